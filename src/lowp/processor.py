"""A machine on which torch's 16-bit products would end the process: AMX is announced, but cannot be configured.

Some virtual machines pass Intel's AMX flags on and end the list of CPUID leaves at 0x1c. The sizes of AMX's tiles stand in leaf
0x1d: oneDNN reads zeros there, configures no tiles, and its first product in bfloat16 or float16 is an illegal instruction
(SIGILL; seen with torch 2.13 on a Xeon under Firecracker). oneDNN reads ONEDNN_MAX_CPU_ISA at its first product. It is set
here, before that, to the instructions below AMX. What a user has set stays as it is. `lowp doctor` says so.
"""

import os

_TILE_LEAF = 0x1D
BELOW_AMX = "AVX512_CORE_FP16"


def amx_is_broken(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Does the first processor announce AMX without the leaf that describes its tiles?"""
    try:
        with open(cpuinfo, encoding="ascii", errors="replace") as file:
            first = file.read(1 << 16).split("\n\n", 1)[0]
    except OSError:  # not Linux
        return False
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    level = fields.get("cpuid level", "")
    return "amx_tile" in fields.get("flags", "").split() and level.isdecimal() and int(level) < _TILE_LEAF


if "ONEDNN_MAX_CPU_ISA" not in os.environ and amx_is_broken():
    os.environ["ONEDNN_MAX_CPU_ISA"] = BELOW_AMX
