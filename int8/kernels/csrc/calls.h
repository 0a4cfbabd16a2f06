// Counts which kernels ran, so that a process can prove it (int8.evidence reads the counts).
#pragma once

// `name` must live as long as the process, as string literals do.
void int8_count_call(const char* name);
