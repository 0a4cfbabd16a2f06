// Linux grants AMX tiles a process on request; an instruction on a tile before that ends the process with SIGILL.
#pragma once

#if defined(__linux__) && !defined(INT8_EMULATE_ISA)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace int8_kernels {

// What to raise where require_amx_permission() is false.
constexpr const char* kAmxDenied =
    "Linux denies this process the AMX tiles (a container's or a VM's policy, or a kernel before 5.16); "
    "start it with INT8_ISA=vnni, or allow arch_prctl(ARCH_REQ_XCOMP_PERM)";

// Asks once a process and remembers the answer; true if tiles may be used, by every thread from then on.
inline bool require_amx_permission() {
#ifdef INT8_EMULATE_ISA
  return true;
#elif defined(__linux__)
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr long kXfeatureXtileData = 18;
  static const bool granted = syscall(158 /* arch_prctl */, kArchReqXcompPerm, kXfeatureXtileData) == 0;
  return granted;
#else
  return false;
#endif
}

}  // namespace int8_kernels
