/* A pool of threads that all do their part of one piece of work, and the caller with them.

   Why this is safe. One thread at a time gives work. It writes what is to be done, then counts `turn` up (release); a
   worker that sees the new count (acquire) sees the work. Workers count `left` down when they have done their part
   (release), and the caller waits for all of them (acquire) before it returns: so what they wrote is there, and none
   reads the work of a turn after it. The count goes up with the lock held, and a worker looks at it with the lock held
   before it sleeps: so it sleeps through no turn. */

#include <pthread.h>
#include <sched.h>

#define PATIENCE 4000 /* Looks before a worker sleeps, usually, and before the caller lets others compute: some 50 us. */

struct pool {
    void (*part)(void *);
    void *about;
    pthread_mutex_t lock;
    pthread_cond_t given;
    uint32_t turn, stop;
    int32_t left, workers, patience; /* patience: looks before a worker sleeps. */
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
static uint32_t next_turn(struct pool *pool, uint32_t seen)
{
    uint32_t turn = seen;
    for (int looks = 0; looks < pool->patience && turn == seen; looks++) {
        pause_between(looks);
        turn = __atomic_load_n(&pool->turn, __ATOMIC_ACQUIRE);
    }
    if (turn != seen)
        return turn;
    pthread_mutex_lock(&pool->lock);
    while ((turn = pool->turn) == seen)
        pthread_cond_wait(&pool->given, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    return turn;
}

static void *worker(void *about)
{
    struct pool *pool = about;
    for (uint32_t seen = 0;;) {
        seen = next_turn(pool, seen);
        if (pool->stop)
            return 0;
        pool->part(pool->about);
        __atomic_sub_fetch(&pool->left, 1, __ATOMIC_RELEASE);
    }
}

static void give_turn(struct pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    __atomic_add_fetch(&pool->turn, 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&pool->given);
    pthread_mutex_unlock(&pool->lock);
}

/* Have every thread call part(about), this one too. Returns when all have. */
static void pool_run(struct pool *pool, void (*part)(void *), void *about)
{
    pool->part = part, pool->about = about;
    __atomic_store_n(&pool->left, pool->workers, __ATOMIC_RELAXED);
    give_turn(pool);
    part(about);
    for (int looks = 0; __atomic_load_n(&pool->left, __ATOMIC_ACQUIRE); looks++)
        pause_between(looks);
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
    free(pool);
}

/* A pool of so many threads with the caller, or of as many as can be started; null if there is no memory. */
struct pool *pool_open(int threads)
{
    struct pool *pool = calloc(1, sizeof *pool + (size_t)threads * sizeof *pool->ids);
    if (!pool)
        return 0;
    pool->patience = PATIENCE;
    pthread_mutex_init(&pool->lock, 0);
    pthread_cond_init(&pool->given, 0);
    while (pool->workers + 1 < threads && !pthread_create(&pool->ids[pool->workers], 0, worker, pool))
        pool->workers++;
    return pool;
}
