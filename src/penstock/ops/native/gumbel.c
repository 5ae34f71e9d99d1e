/* Gumbel noise of tokens: words of Philox4x32-10 (Salmon et al. 2011), and the noise that a word stands for. See
   penstock.ops.gumbel, which has the same operations in the same order: results are equal bit for bit.

   Each number depends on its key, position and token alone. */

#define NOISE_BLOCKS 64 /* Blocks of four tokens that are computed at a time. */
#define NOISE_TOKENS (4 * NOISE_BLOCKS)
#define MOST_NOISE 23.0f

/* The words of blocks `first` and on: word i of block b at [i][b]. */
INLINE void philox(const uint32_t key[4], const uint32_t first[NOISE_BLOCKS], uint32_t words[4][NOISE_BLOCKS])
{
    for (int b = 0; b < NOISE_BLOCKS; b++) {
        uint32_t c0 = first[b], c1 = 0, c2 = key[2], c3 = key[3], k0 = key[0], k1 = key[1];
#pragma GCC unroll 10
        for (int round = 0; round < 10; round++) {
            uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
            c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
            c1 = (uint32_t)p1, c3 = (uint32_t)p0;
            k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
        }
        words[0][b] = c0, words[1][b] = c1, words[2][b] = c2, words[3][b] = c3;
    }
}

/* The logarithm of x; `near`: x - 1 where x is beside 1, which may have more digits than x. */
INLINE float log_of(float x, float near)
{
    int32_t bits = (int32_t)bits_of(x), power = (bits - 0x3F3504F3) >> 23;
    float far = of_bits((uint32_t)(bits - power * (1 << 23))) - 1.0f;
    uint32_t is_near = power == 0 ? 0xFFFFFFFFu : 0; /* Chosen by bits: a branch would keep loops from vectors. */
    float f = of_bits((bits_of(near) & is_near) | (bits_of(far) & ~is_near));
    float sum = 0.08734836429357529f;
    sum = sum * f + -0.14307518303394318f;
    sum = sum * f + 0.14917974174022675f;
    sum = sum * f + -0.16570508480072021f;
    sum = sum * f + 0.19962072372436523f;
    sum = sum * f + -0.25001755356788635f;
    sum = sum * f + 0.33333951234817505f;
    sum = sum * f + -0.49999991059303284f;
    return (float)power * 0.6931471824645996f + (f * f * sum + f);
}

INLINE float noise_of(uint32_t word)
{
    float below = ((float)word + 0.5f) * 0x1p-32f, above = ((float)~word + 0.5f) * 0x1p-32f;
    float waits = -log_of(above, -below);
    return -log_of(waits, waits - 1.0f);
}

/* out [count] = the noise of tokens [count], or of tokens 0 and on if that is NULL. */
void gumbel(uint32_t key_low, uint32_t key_high, uint32_t position_low, uint32_t position_high,
            const int64_t *tokens, int64_t count, float *out)
{
    const uint32_t key[4] = {key_low, key_high, position_low, position_high};
    int64_t each = tokens ? NOISE_BLOCKS : NOISE_TOKENS;
    for (int64_t at = 0; at < count; at += each) {
        uint32_t blocks[NOISE_BLOCKS], words[4][NOISE_BLOCKS], chosen[NOISE_TOKENS];
        float noise[NOISE_TOKENS];
        int64_t here = count - at < each ? count - at : each;
        for (int b = 0; b < NOISE_BLOCKS; b++)
            blocks[b] = (uint32_t)(tokens ? (b < here ? tokens[at + b] / 4 : 0) : at / 4 + b);
        philox(key, blocks, words);
        if (tokens)
            for (int b = 0; b < NOISE_BLOCKS; b++)
                chosen[b] = words[b < here ? tokens[at + b] % 4 : 0][b];
        else
            for (int b = 0; b < NOISE_BLOCKS; b++)
                for (int i = 0; i < 4; i++)
                    chosen[4 * b + i] = words[i][b];
        for (int i = 0; i < each; i++)
            noise[i] = noise_of(chosen[i]);
        memcpy(out + at, noise, (size_t)here * sizeof *out);
    }
}

/* A number as an integer in the same order; the two zeros are one. */
INLINE int32_t order_of(float x)
{
    int32_t bits = (int32_t)bits_of(x + 0.0f);
    return bits ^ (bits >> 31 & 0x7FFFFFFF);
}

/* NaN is an impossible token. */
INLINE float logit_of(float x)
{
    uint32_t is_number = x == x ? 0xFFFFFFFFu : 0;
    return of_bits((bits_of(x) & is_number) | (bits_of(-INFINITY) & ~is_number));
}

/* The token of logits [count] whose logit by the temperature is highest with its noise; the first, of equal ones.
   Tokens so far below the best that no noise makes up for it get none. */
int64_t gumbel_best(uint32_t key_low, uint32_t key_high, uint32_t position_low, uint32_t position_high,
                    const float *logits, int64_t count, float heat)
{
    const uint32_t key[4] = {key_low, key_high, position_low, position_high};
    int32_t highest = order_of(-INFINITY), best = INT32_MIN;
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t order = order_of(logit_of(logits[i]));
        highest = order > highest ? order : highest;
    }
    float top = of_bits((uint32_t)(highest ^ (highest >> 31 & 0x7FFFFFFF))) / heat, lead = -INFINITY;
    for (int64_t at = 0; at < count; at += NOISE_TOKENS) {
        int64_t here = count - at < NOISE_TOKENS ? count - at : NOISE_TOKENS;
        uint32_t blocks[NOISE_BLOCKS], words[4][NOISE_BLOCKS], chosen[NOISE_TOKENS];
        float below[NOISE_TOKENS];
        int32_t orders[NOISE_TOKENS], most = INT32_MIN;
        for (int i = 0; i < NOISE_TOKENS; i++)
            below[i] = i < here ? logits[at + i] : -INFINITY;
        for (int i = 0; i < NOISE_TOKENS; i++) {
            float warm = logit_of(below[i]) / heat, under = warm - top;
            below[i] = of_bits(bits_of(under) & (warm == top ? 0 : 0xFFFFFFFFu)); /* Several may be infinite. */
            int32_t order = order_of(below[i]);
            most = order > most ? order : most;
        }
        if (of_bits((uint32_t)(most ^ (most >> 31 & 0x7FFFFFFF))) + MOST_NOISE < lead)
            continue;
        for (int b = 0; b < NOISE_BLOCKS; b++)
            blocks[b] = (uint32_t)(at / 4 + b);
        philox(key, blocks, words);
        for (int b = 0; b < NOISE_BLOCKS; b++)
            for (int i = 0; i < 4; i++)
                chosen[4 * b + i] = words[i][b];
        most = INT32_MIN;
        for (int i = 0; i < NOISE_TOKENS; i++) {
            orders[i] = order_of(below[i] + noise_of(chosen[i]));
            most = orders[i] > most ? orders[i] : most;
        }
        if (most <= best)
            continue;
        for (int i = 0; i < here; i++)
            if (orders[i] == most) {
                best = most, found = at + i;
                lead = below[i] + noise_of(chosen[i]);
                break;
            }
    }
    return found;
}
