/* A copier: a thread that has a copy engine bring experts from host memory to a device, as kernels of the device ask
   for them by flags in memory which both see. A copy engine is some 7 % faster than kernels that read through the link.

   The device writes which experts of a layer come to which places, part by part, and then the number of the last part
   that may come, `asked`. The thread queues the copies of each part on one stream, and behind them a write of the
   part's number to the device's memory, `came`, for which the device waits. While nothing is asked for, the expert that
   is foretold comes to a place of its own, in chunks; if it is asked for, these are copied from there.

   Why this is safe. The device fences between a list and `asked`, and the thread reads `asked` first (acquire). A list
   is written again only by the layer that is decided next: behind the wait for the last part of this one, whose number
   is queued when the list has been read. Copies of one stream end in its order, so `came` is behind the bytes that it
   is said of, and a chunk is in the place ahead when it is copied from there. A place gets bytes only after it was
   asked for, so the device says when it may be written to; the place ahead is this thread's alone until `settle`
   returns, which is behind all that was queued. Experts in host memory do not change. Numbers go up by one, wrap
   around, and are compared by their difference. The thread takes no number on trust: what would lead out of experts or
   places is not copied, `failed` says so, and `over` ends all waiting. */

#define CHUNK 524288 /* Bytes that come ahead at a time: 10 us of a link of 50 GB/s. */
#define UNDER_WAY 2  /* Chunks that come ahead at once. */
#define HEAD 3       /* Numbers of a list before ends and experts. */

typedef int enter_fn(void *context);
typedef int copy_fn(uint64_t to, uint64_t from, size_t bytes, void *stream);
typedef int write_fn(void *stream, uint64_t at, uint32_t value, unsigned flags);

struct copier {
    const int32_t *asked; /* The last part that may come. */
    const int64_t *told;  /* The decision that an expert is foretold for, times 2^32, and the expert, or -1. */
    const int32_t *list;  /* The part before the layer's first, its parts, the decision that comes next; then, of each
                             part, how many experts come up to its end; then, of each expert, itself and its place.
                             There is room for `most` parts and experts. */
    int32_t *passed;      /* What the engine has done of what was queued. */
    int32_t *over;        /* Nobody waits any more. */
    int32_t *failed;      /* 1: a copy was refused; 2: what was asked for is not there. */
    int64_t *brought;     /* Bytes, and of these those that came ahead. */
    uint64_t came, host, base;
    int64_t experts, places, size, most, ahead;
    enter_fn *enter; /* cuCtxSetCurrent, cuMemcpyHtoDAsync, cuMemcpyDtoDAsync, cuStreamWriteValue32; or null. */
    copy_fn *in, *within;
    write_fn *write;
    void *context, *stream;
    /* What this thread alone has. */
    int32_t settling, settled, stop, live;
    uint32_t seen, issued;
    int64_t expert, queued, told_seen;
    pthread_t id;
};

/* Where device and host are the same memory. */
static int enter_here(void *context)
{
    (void)context;
    return 0;
}

static int copy_here(uint64_t to, uint64_t from, size_t bytes, void *stream)
{
    (void)stream;
    memcpy((void *)to, (const void *)from, bytes);
    return 0;
}

static int write_here(void *stream, uint64_t at, uint32_t value, unsigned flags)
{
    (void)stream, (void)flags;
    __atomic_store_n((uint32_t *)at, value, __ATOMIC_RELEASE);
    return 0;
}

/* Queue the mark behind all that was queued. */
static int note(struct copier *c)
{
    return c->write(c->stream, (uint64_t)c->passed, ++c->issued, 0);
}

/* Queue the part with this number. Returns as `failed` has it. */
static int bring(struct copier *c, uint32_t number)
{
    const int32_t *ends = c->list + HEAD, *pairs = ends + c->most;
    int64_t part = (int64_t)(number - (uint32_t)c->list[0]) - 1, parts = c->list[1];
    if (part < 0 || part >= parts || parts > c->most)
        return 2;
    int64_t first = part ? ends[part - 1] : 0, end = ends[part];
    if (first < 0 || end < first || end > c->most)
        return 2;
    for (int64_t i = first; i < end; i++) {
        int64_t expert = pairs[2 * i], place = pairs[2 * i + 1], done = 0;
        if (expert < 0 || expert >= c->experts || place < 0 || place >= c->places || place == c->ahead)
            return 2;
        uint64_t to = c->base + place * c->size, from = c->host + expert * c->size;
        if (expert == c->expert && c->queued) {
            done = c->queued;
            if (c->within(to, c->base + c->ahead * c->size, done, c->stream))
                return 1;
        }
        if (done < c->size && c->in(to + done, from + done, c->size - done, c->stream))
            return 1;
        c->brought[0] += c->size, c->brought[1] += done;
    }
    return c->write(c->stream, c->came, number, 0) || note(c) ? 1 : 0;
}

/* Queue another chunk of what is foretold, if there is something to do and the engine waits. Returns as `failed`. */
static int look_ahead(struct copier *c)
{
    int64_t told = __atomic_load_n(c->told, __ATOMIC_ACQUIRE);
    if (told != c->told_seen) {
        int32_t expert = (int32_t)told, turn = (int32_t)(told >> 32);
        c->told_seen = told;
        c->live = expert >= 0 && (int32_t)((uint32_t)turn - (uint32_t)c->list[2]) >= 0;
        if (c->live && expert >= c->experts)
            return 2;
        if (c->live && expert != c->expert)
            c->expert = expert, c->queued = 0;
    }
    uint32_t under_way = c->issued - (uint32_t)__atomic_load_n(c->passed, __ATOMIC_ACQUIRE);
    if (!c->live || c->queued >= c->size || under_way >= UNDER_WAY)
        return 0;
    int64_t bytes = c->size - c->queued < CHUNK ? c->size - c->queued : CHUNK;
    uint64_t to = c->base + c->ahead * c->size + c->queued, from = c->host + c->expert * c->size + c->queued;
    if (c->in(to, from, bytes, c->stream) || note(c))
        return 1;
    c->queued += bytes;
    return 0;
}

static void *bring_all(void *about)
{
    struct copier *c = about;
    int failed = c->enter(c->context) ? 1 : 0;
    for (int looks = 0; !__atomic_load_n(&c->stop, __ATOMIC_ACQUIRE);) {
        if (failed) {
            __atomic_store_n(c->failed, failed, __ATOMIC_RELAXED);
            __atomic_store_n(c->over, 1, __ATOMIC_RELEASE);
        }
        int32_t wanted = __atomic_load_n(&c->settling, __ATOMIC_ACQUIRE);
        if (wanted != c->settled) {
            c->live = 0, c->expert = -1, c->queued = 0;
            c->told_seen = __atomic_load_n(c->told, __ATOMIC_ACQUIRE);
            if (failed || (uint32_t)__atomic_load_n(c->passed, __ATOMIC_ACQUIRE) == c->issued)
                __atomic_store_n(&c->settled, wanted, __ATOMIC_RELEASE);
            continue;
        }
        uint32_t asked = (uint32_t)__atomic_load_n(c->asked, __ATOMIC_ACQUIRE);
        if (!failed && asked != c->seen) {
            failed = bring(c, ++c->seen);
            c->live = 0, looks = 0;
            continue;
        }
        /* Nothing comes ahead of a layer's own experts. */
        if (!failed && c->ahead >= 0 && c->seen - (uint32_t)c->list[0] == (uint32_t)c->list[1]) {
            int64_t before = c->queued;
            failed = look_ahead(c);
            if (c->queued != before)
                looks = 0;
        }
        if (looks < IDLE)
            pause_between(looks++);
        else /* for about two seconds often, then seldom */
            nanosleep(&(struct timespec){0, looks < IDLE + 40000 ? looks++, 50000 : 1000000}, 0);
    }
    return 0;
}

/* Forget what is foretold, and wait until all that was queued is done. To be called when no step runs. */
void copier_settle(struct copier *c)
{
    int32_t wanted = __atomic_add_fetch(&c->settling, 1, __ATOMIC_ACQ_REL);
    for (int looks = 0; __atomic_load_n(&c->settled, __ATOMIC_ACQUIRE) != wanted; looks++)
        pause_between(looks);
}

/* End the thread, behind all that was queued. */
void copier_close(struct copier *c)
{
    copier_settle(c);
    __atomic_store_n(&c->stop, 1, __ATOMIC_RELEASE);
    pthread_join(c->id, 0);
    free(c);
}

/* Begin; null if that is not possible. What `given` points to must stay. */
struct copier *copier_open(const struct copier *given)
{
    struct copier *c = malloc(sizeof *c);
    if (!c)
        return 0;
    *c = *given;
    if (!c->in)
        c->enter = enter_here, c->in = c->within = copy_here, c->write = write_here;
    c->settling = c->settled = c->stop = c->live = 0, c->issued = 0, c->queued = 0, c->expert = -1;
    c->seen = (uint32_t)*c->asked, *c->passed = 0, c->told_seen = *c->told;
    if (pthread_create(&c->id, 0, bring_all, c)) {
        free(c);
        return 0;
    }
    return c;
}
