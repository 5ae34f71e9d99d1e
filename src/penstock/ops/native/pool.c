/* A pool of threads that all do their part of one piece of work, and the caller with them.

   Why this is safe. One thread at a time gives work. It writes what is to be done, then counts `turn` up (release); a
   worker that sees the new count (acquire) sees the work. Workers count `left` down when they have done their part
   (release), and the caller waits for all of them (acquire) before it returns: so what they wrote is there, and none
   reads the work of a turn after it. The count goes up with the lock held, and a worker looks at it with the lock held
   before it sleeps: so it sleeps through no turn. What many threads look at or count lies in a line of the cache of its
   own: so none of them waits for a line that others write for another reason. */

#include <pthread.h>
#include <sched.h>

#define PATIENCE 4000 /* Looks before a worker sleeps, usually, and before the caller lets others compute: some 50 us. */

/* A number that threads count, in a line of the cache of its own. */
struct counter {
    _Alignas(64) int64_t of;
};

struct pool {
    struct counter turn, left;
    void (*part)(void *);
    void *about;
    void *room; /* What calls work in: it is kept, since to be given new memory takes longer than many a call. */
    size_t room_bytes;
    pthread_mutex_t lock;
    pthread_cond_t given;
    int32_t stop, workers, patience, tiles; /* patience: looks before a worker sleeps. */
    pthread_t ids[];
};

/* Between two looks at what another thread writes. There may be more threads than cores. */
INLINE void pause_between(int looks)
{
    if (looks >= PATIENCE)
        sched_yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The count of turns, once it is not `seen` any more. */
static int64_t next_turn(struct pool *pool, int64_t seen)
{
    int64_t turn = seen;
    for (int looks = 0; looks < pool->patience && turn == seen; looks++) {
        pause_between(looks);
        turn = __atomic_load_n(&pool->turn.of, __ATOMIC_ACQUIRE);
    }
    if (turn != seen)
        return turn;
    pthread_mutex_lock(&pool->lock);
    while ((turn = pool->turn.of) == seen)
        pthread_cond_wait(&pool->given, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    return turn;
}

static void *worker(void *about)
{
    struct pool *pool = about;
    for (int64_t seen = 0;;) {
        seen = next_turn(pool, seen);
        if (pool->stop)
            return 0;
        pool->part(pool->about);
        __atomic_sub_fetch(&pool->left.of, 1, __ATOMIC_RELEASE);
    }
}

static void give_turn(struct pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    __atomic_add_fetch(&pool->turn.of, 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&pool->given);
    pthread_mutex_unlock(&pool->lock);
}

/* Have every thread call part(about), this one too. Returns when all have. */
static void pool_run(struct pool *pool, void (*part)(void *), void *about)
{
    pool->part = part, pool->about = about;
    __atomic_store_n(&pool->left.of, pool->workers, __ATOMIC_RELAXED);
    give_turn(pool);
    part(about);
    for (int looks = 0; __atomic_load_n(&pool->left.of, __ATOMIC_ACQUIRE); looks++)
        pause_between(looks);
}

/* Room for a call of so many bytes, of any content, until the next call; null if there is no memory. */
static void *pool_room(struct pool *pool, size_t bytes)
{
    if (bytes > pool->room_bytes) {
        free(pool->room);
        pool->room_bytes = (bytes + bytes / 4 + 63) / 64 * 64;
        pool->room = aligned_alloc(64, pool->room_bytes);
        if (!pool->room)
            pool->room_bytes = 0;
    }
    return pool->room;
}

/* Let all threads end, and give up the pool. */
void pool_close(struct pool *pool)
{
    pool->stop = 1;
    give_turn(pool);
    for (int i = 0; i < pool->workers; i++)
        pthread_join(pool->ids[i], 0);
    pthread_mutex_destroy(&pool->lock);
    pthread_cond_destroy(&pool->given);
    free(pool->room);
    free(pool);
}

/* A pool of so many threads with the caller, or of as many as can be started; null if there is no memory. tiles: what it
   computes may be multiplied by tiles. */
struct pool *pool_open(int threads, int tiles)
{
    size_t bytes = (sizeof(struct pool) + (size_t)threads * sizeof(pthread_t) + 63) / 64 * 64;
    struct pool *pool = aligned_alloc(64, bytes);
    if (!pool)
        return 0;
    memset(pool, 0, bytes);
    pool->patience = PATIENCE, pool->tiles = tiles && tiles_there();
    pthread_mutex_init(&pool->lock, 0);
    pthread_cond_init(&pool->given, 0);
    while (pool->workers + 1 < threads && !pthread_create(&pool->ids[pool->workers], 0, worker, pool))
        pool->workers++;
    return pool;
}
