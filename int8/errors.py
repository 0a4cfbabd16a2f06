"""Errors of the library. Each message names the part that failed and what to do about it."""

from __future__ import annotations


class Int8Error(Exception):
    """Base of every error that this library raises on purpose."""


class RecipeError(Int8Error):
    """A recipe is unknown, or one of its values is out of range."""


class IsaError(Int8Error):
    """The requested ISA is unknown, missing on this CPU, or was requested too late."""


class CalibrationError(Int8Error):
    """Calibration saw no data, bad data, or data that the model cannot take."""


class QuantizationError(Int8Error):
    """The model has nothing to quantize, or a layer that the recipe cannot express."""


class FusionError(Int8Error):
    """A compiled model runs quantized linears outside the fused kernels."""


class ArtifactError(Int8Error):
    """A saved model is damaged, or was built for what this host cannot compute exactly."""


class PackageError(Int8Error):
    """A package cannot be built, is damaged, or was built for what this process is not."""


class ToolchainError(Int8Error):
    """No working C++ compiler was found."""
