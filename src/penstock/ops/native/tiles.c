/* Tiles of bfloat16 (AMX), where the processor has them and the system lets this process use them: one instruction adds
   the products of 16 rows of a matrix with up to 16 rows of x, over 32 columns, to as many sums.

   A sum takes the products of even columns and those of odd ones, each in their order, in float32, and adds both to
   what it was. So it depends neither on how many rows of x there are nor on which. Numbers below 2^-126 count as 0. */

#include "layers.c"

#if defined(__AVX512BF16__) && LANES == 16
#define DOTS 1
#else
#define DOTS 0
#endif

enum { SUMS = 0, OF = 2, BY = 4 }; /* Tiles: sums, rows of a matrix and rows of x, two of each. */

#if DOTS && !defined(TILES) && defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#define TILES 1

/* Written here, since those of compilers do not say which memory they read and write. */
#define tile_shapes(from) __asm__ volatile("ldtilecfg %0" ::"m"(*(const struct shapes *)(from)))
#define tile_release() __asm__ volatile("tilerelease" ::)
#define tile_zero(tile) __asm__ volatile("tilezero %%tmm%c0" ::"i"(tile))
#define tile_load(tile, from, stride)                                                                          \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"((int64_t)(stride)), "i"(tile) : "memory")
#define tile_store(tile, to, stride)                                                                           \
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"((int64_t)(stride)), "i"(tile) : "memory")
#define tile_multiply(sums, of, by)                                                                            \
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(of), "i"(by))

/* Whether the system lets this process use them. */
static int tiles_allowed(void)
{
    const long ask = 0x1023, data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return syscall(SYS_arch_prctl, ask, data) == 0;
}
#elif !DOTS || !defined(TILES) /* A test has its own, in plain C. */
#undef TILES
#define TILES 0
#endif

/* What a tile register holds. */
struct shapes {
    uint8_t palette, start, none[14];
    uint16_t bytes[16]; /* Of a row. */
    uint8_t rows[16];
};

/* Whether there are tiles, and this process may use them: it asks once for all. Threads that ask at the same time are
   given the same answer. */
static int tiles_there(void)
{
#if TILES
    static int answer; /* 1, or -1: no. */
    int known = __atomic_load_n(&answer, __ATOMIC_RELAXED);
    if (!known)
        __atomic_store_n(&answer, known = tiles_allowed() ? 1 : -1, __ATOMIC_RELAXED);
    return known > 0;
#else
    return 0;
#endif
}
