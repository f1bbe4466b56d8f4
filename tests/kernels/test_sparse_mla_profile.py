"""The profile of sparse MLA: what it reads of Nsight Compute's two pages, in the form that 2025.3 writes them."""

from bench import sparse_mla_profile as profile

SOURCE = """"Kernel Name","sparse_mla_mosaic_gpu_kernel"
"Address","Source","Warp Stall Sampling (All Samples)","# Samples","stall_gmma","stall_wait","stall_wait_not_issued"
"0","      @P0 LDGSTS.E.128 [R1], [R2]","10","10","0","10","9"
"16","      MOV R1, R2","3","3","0","3","3"
"32","      HGMMA.64x64x16.F32 R24, gdesc[UR4], R24","1,000","1,000","990","10","0"
"48","      FADD R1, R2, R3","5","5","0","5","0"
"Kernel Name","sparse_mla_mosaic_gpu_kernel"
"Address","Source","Warp Stall Sampling (All Samples)","# Samples","stall_gmma","stall_wait","stall_wait_not_issued"
"0","      EXIT","1","1","0","1","0"
"""
RAW = """==PROF== Connected to process 7
"ID","Kernel Name","gpu__time_duration.sum","launch__registers_per_thread"
"","","us","register/thread"
"0","sparse_mla_mosaic_gpu_kernel","192.9","168"
"""


def test_instructions_have_samples_reasons_and_a_role():
    """A predicate is no opcode; what was issued after all is not counted twice; a role reaches to the nearest mark."""
    lines, last = profile.instructions(SOURCE)
    assert [profile.samples(line) for line in lines] == [10, 3, 1000, 5] and len(last) == 1
    assert dict(profile.reasons(lines[0])) == {"wait": 10}
    assert dict(profile.reasons(lines[2])) == {"gmma": 990, "wait": 10}
    assert profile.opcode(lines[0]) == "LDGSTS.E.128"
    assert profile.roles(lines)[::2] == ["gathering", "attending"] and profile.roles(lines)[3] == "attending"


def test_counters_come_with_their_units():
    [kernel] = profile.counters(RAW)
    assert kernel["gpu__time_duration.sum"] == "192.9 us"
    assert kernel["launch__registers_per_thread"] == "168 register/thread"
