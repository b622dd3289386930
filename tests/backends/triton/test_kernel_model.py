"""The kernel model counts instructions of a given machine code."""

from bench.kernel_model import counts, instructions_of, product_loops

# A loop of two products, a wait that stands behind the code, an epilogue of one exponential.
CODE = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;     /* 0x00000a00ff017b82 */
        /*0010*/                   SYNCS.PHASECHK P0, [UR4] ; /* 0x0000000000000000 */
        /*0020*/               @P0 BRA 0x90 ;                 /* 0x0000000000000000 */
        /*0030*/                   HGMMA.64x128x16.F32 R24 ;  /* 0x0000000000000000 */
        /*0040*/                   HGMMA.64x128x16.F32 R24 ;  /* 0x0000000000000000 */
        /*0050*/              @!P1 BRA 0x10 ;                 /* 0x0000000000000000 */
        /*0060*/                   MUFU.EX2 R2, R2 ;          /* 0x0000000000000000 */
        /*0070*/                   FFMA R2, R2, R2, R3 ;      /* 0x0000000000000000 */
        /*0080*/                   FSETP.GT.AND P0, PT, R2 ;  /* 0x0000000000000000 */
        /*0090*/                   SYNCS.PHASECHK P0, [UR4] ; /* 0x0000000000000000 */
        /*00a0*/               @P0 BRA 0x30 ;                 /* 0x0000000000000000 */
"""


def test_counts_of_a_tile():
    code = instructions_of(CODE)
    assert len(code) == 11
    assert product_loops(code) == [(0x10, 0x50)]
    found = counts(code, steps=12)
    assert found["tensor"] == 2 * 12
    assert found["special"] == found["fma"] == found["alu"] == 1
    # The waits: one in the loop, one behind it; the load of an argument.
    assert found["memory"] == 12 + 1 + 1
    assert found["control"] == 2 * 12 + 1
