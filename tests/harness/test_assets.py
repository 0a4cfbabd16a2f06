"""Assets: wheels made here, fetched by pip from a folder, so that no index is needed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness import assets
from harness.errors import AssetError, UsageError

FILES = {
    "demo_asset/weights.bin": b"\x00\x01" * 5000,
    "demo_asset/notes.txt": b"read me\n",
    "demo_asset/extra.py": b"x = 1\n",
}


def make_wheel(folder: Path) -> Path:
    """A wheel of the distribution demo-asset 1.0 that pip accepts."""
    path = folder / "demo_asset-1.0-py3-none-any.whl"
    info = "demo_asset-1.0.dist-info"
    contents = FILES | {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: demo-asset\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return path


def member(path: str, name: str) -> assets.Member:
    content = FILES[path]
    return assets.Member(path=path, name=name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only source of packages, and an empty root for assets."""
    folder = tmp_path / "links"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("INT8_ASSETS", str(tmp_path / "assets"))
    return folder


@pytest.fixture
def asset(links: Path) -> assets.Asset:
    wheel = make_wheel(links)
    return assets.Asset(
        name="demo",
        purpose="tests",
        licence="none",
        distribution="demo-asset",
        version="1.0",
        wheel_sha256=assets.sha256(wheel),
        wheel_bytes=wheel.stat().st_size,
        members=(member("demo_asset/weights.bin", "weights.bin"), member("demo_asset/notes.txt", "notes.txt")),
    )


def test_fetches_the_named_members_and_nothing_else(asset: assets.Asset) -> None:
    said: list[str] = []
    folder = assets.ensure(asset, progress=said.append)
    assert folder == assets.root() / "demo-1.0"
    assert {path.name for path in folder.iterdir()} == {"weights.bin", "notes.txt", "asset.json"}
    assert (folder / "weights.bin").read_bytes() == FILES["demo_asset/weights.bin"]
    assert any("demo-asset==1.0" in line for line in said)
    assert not list(assets.root().glob(".fetch-*"))


def test_a_present_asset_needs_no_index(asset: assets.Asset, links: Path) -> None:
    folder = assets.ensure(asset)
    (links / "demo_asset-1.0-py3-none-any.whl").unlink()
    assert assets.ensure(asset) == assets.ensure(asset, offline=True) == assets.ensure(asset, verify=True) == folder


def test_missing_and_offline_says_what_to_run(asset: assets.Asset) -> None:
    with pytest.raises(AssetError, match=r"asset demo is missing .* run `harness fetch`"):
        assets.ensure(asset, offline=True)
    assert not assets.root().exists()


def test_missing_and_no_index_says_what_to_run(asset: assets.Asset, links: Path) -> None:
    (links / "demo_asset-1.0-py3-none-any.whl").unlink()
    with pytest.raises(AssetError, match=r"pip could not get demo-asset==1.0: No matching .*`harness fetch`") as caught:
        assets.ensure(asset)
    assert "\n" not in str(caught.value)
    assert not (assets.root() / "demo-1.0").exists()


def test_a_wheel_of_another_hash_leaves_nothing(asset: assets.Asset) -> None:
    with pytest.raises(AssetError, match=r"SHA-256 \w{64} instead of 0{64}; nothing was kept"):
        assets.ensure(replace(asset, wheel_sha256="0" * 64))
    assert not [path for path in assets.root().iterdir() if path.is_dir()]


@pytest.mark.parametrize("wrong", [{"sha256": "0" * 64}, {"path": "demo_asset/absent.bin"}])
def test_a_table_that_does_not_fit_the_wheel_leaves_nothing(asset: assets.Asset, wrong: dict[str, str]) -> None:
    members = (asset.members[0], replace(asset.members[1], **wrong))
    with pytest.raises(AssetError, match=r"correct catalog/assets.toml"):
        assets.ensure(replace(asset, members=members))
    assert not [path for path in assets.root().iterdir() if path.is_dir()]


def test_a_damaged_file_is_named_and_the_cure_works(asset: assets.Asset) -> None:
    path = assets.ensure(asset) / "weights.bin"
    path.write_bytes(b"\xff" + path.read_bytes()[1:])  # the same size
    with pytest.raises(AssetError, match=r"weights.bin has the wrong hash; delete the folder .* `harness fetch`"):
        assets.ensure(asset)
    path.write_bytes(b"short")
    with pytest.raises(AssetError, match=r"weights.bin has 5 bytes instead of 10000"):
        assets.ensure(asset)
    path.unlink()
    with pytest.raises(AssetError, match=r"weights.bin is missing; delete"):
        assets.ensure(asset)
    for left in path.parent.iterdir():
        left.unlink()
    path.parent.rmdir()
    assert (assets.ensure(asset) / "weights.bin").read_bytes() == FILES["demo_asset/weights.bin"]


def test_verify_finds_what_the_quick_check_cannot(asset: assets.Asset) -> None:
    path = assets.ensure(asset) / "weights.bin"
    before = path.stat()
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assets.ensure(asset)
    with pytest.raises(AssetError, match="wrong hash"):
        assets.ensure(asset, verify=True)


def test_without_its_manifest_an_asset_is_hashed(asset: assets.Asset) -> None:
    folder = assets.ensure(asset)
    (folder / "asset.json").write_text("{torn")
    assert assets.ensure(asset) == folder
    before = (folder / "weights.bin").stat()
    (folder / "weights.bin").write_bytes(b"\xff" * 10000)
    os.utime(folder / "weights.bin", ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(AssetError, match="wrong hash"):
        assets.ensure(asset)


def test_a_root_that_cannot_be_written_is_one_line(
    asset: assets.Asset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("INT8_ASSETS", str(tmp_path / "file" / "below"))
    with pytest.raises(AssetError, match="set INT8_ASSETS to another folder"):
        assets.ensure(asset)


def test_processes_that_fetch_at_once_do_not_collide(asset: assets.Asset) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from harness.assets import Asset, Member, ensure\n"
        "said = []\n"
        f"folder = ensure({asset!r}, progress=said.append)\n"
        "print(sum(line.startswith('fetched') for line in said), (folder / 'weights.bin').stat().st_size)"
    )
    root = str(Path(assets.__file__).parents[1])
    children = [
        subprocess.Popen([sys.executable, "-c", code, root], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    results = [child.communicate(timeout=120)[0].split() for child in children]
    assert sorted(result[0] for result in results) == ["0", "0", "1"]
    assert {result[1] for result in results} == {"10000"}


def test_an_unknown_asset_gives_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"unknown asset 'rotten-tomatos'; did you mean rotten-tomatoes\?"):
        assets.ensure("rotten-tomatos")


def test_the_table_is_complete() -> None:
    for name, asset in assets.known().items():
        assert asset.purpose and asset.licence, name
        assert len(asset.wheel_sha256) == 64
        assert all(len(member.sha256) == 64 and member.bytes > 0 for member in asset.members)
        assert "LICENSE" in {member.name for member in asset.members}


def test_cached_arrays_are_computed_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def compute() -> assets.Arrays:
        calls.append(1)
        return {"a": np.arange(3), "b": np.array("text")}

    first = assets.cached_arrays("thing", compute, tmp_path)
    second = assets.cached_arrays("thing", compute, tmp_path)
    assert len(calls) == 1
    assert np.array_equal(first["a"], second["a"]) and str(second["b"]) == "text"
    (tmp_path / "thing.npz").write_bytes((tmp_path / "thing.npz").read_bytes()[:40])
    assert np.array_equal(assets.cached_arrays("thing", compute, tmp_path)["a"], np.arange(3))
    assert len(calls) == 2


def test_arrays_that_cannot_be_kept_are_still_right(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="computing thing without keeping it"):
        found = assets.cached_arrays("thing", lambda: {"a": np.ones(2)}, tmp_path / "file")
    assert np.array_equal(found["a"], np.ones(2))
