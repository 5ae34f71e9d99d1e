/* Tiles of bfloat16 in plain C, for processors that have none: what Intel's manual says of each instruction. Tests
   compile the kernels with this in front. */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* They are most of what tests with tiles compute; all else is compiled in less time. */
#pragma GCC push_options
#pragma GCC optimize("O3")

#define TILES 1

struct tile_register {
    _Alignas(64) uint8_t at[16][64];
};

static _Thread_local struct tile_register tile_registers[8];
static _Thread_local struct {
    uint8_t palette, start, none[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_state;

int tiles_refused; /* By the system, if a test says so before the first question. */

static int tiles_allowed(void) { return !tiles_refused; }

static void tile_zero(int tile) { memset(&tile_registers[tile], 0, sizeof(struct tile_register)); }

static void tile_release(void)
{
    memset(&tile_state, 0, sizeof tile_state);
    for (int tile = 0; tile < 8; tile++)
        tile_zero(tile);
}

static void tile_shapes(const void *from)
{
    tile_release();
    memcpy(&tile_state, from, sizeof tile_state);
}

/* An instruction with a tile that has no shape is a fault. */
static void tile_needs(int fine)
{
    if (!tile_state.palette || !fine)
        __builtin_trap();
}

static void tile_load(int tile, const void *from, int64_t stride)
{
    tile_needs(tile_state.rows[tile]);
    tile_zero(tile);
    for (int row = 0; row < tile_state.rows[tile]; row++)
        memcpy(tile_registers[tile].at[row], (const char *)from + row * stride, tile_state.bytes[tile]);
}

static void tile_store(int tile, void *to, int64_t stride)
{
    tile_needs(tile_state.rows[tile]);
    for (int row = 0; row < tile_state.rows[tile]; row++)
        memcpy((char *)to + row * stride, tile_registers[tile].at[row], tile_state.bytes[tile]);
}

/* A float below 2^-126 is zero. */
static float tile_normal(float number) { return fabsf(number) < 0x1p-126f ? 0 : number; }

/* The bfloat16 numbers of a tile's row, even columns and odd ones. */
static void tile_numbers(int tile, int row, float (*to)[16])
{
    for (int column = 0; column < 32; column++) {
        uint32_t bits = 0;
        float number;
        memcpy((char *)&bits + 2, tile_registers[tile].at[row] + 2 * column, 2);
        memcpy(&number, &bits, sizeof number);
        to[column % 2][column / 2] = tile_normal(number);
    }
}

static void tile_multiply(int sums, int of, int by)
{
    int depth = tile_state.bytes[of] / 4;
    tile_needs(tile_state.rows[by] == depth && tile_state.rows[of] == tile_state.rows[sums] &&
               tile_state.bytes[by] == tile_state.bytes[sums]);
    float x[16][2][16];
    for (int k = 0; k < depth; k++)
        tile_numbers(by, k, x[k]);
    for (int row = 0; row < tile_state.rows[sums]; row++) {
        float its[2][16], found[2][16] = {{0}}, *all = (float *)tile_registers[sums].at[row];
        tile_numbers(of, row, its);
        for (int k = 0; k < depth; k++)
            for (int odd = 0; odd < 2; odd++)
                for (int n = 0; n < 16; n++)
                    found[odd][n] = tile_normal(fmaf(its[odd][k], x[k][odd][n], found[odd][n]));
        for (int n = 0; n < tile_state.bytes[sums] / 4; n++)
            all[n] = tile_normal(all[n] + tile_normal(found[0][n] + found[1][n]));
    }
}

#pragma GCC pop_options
