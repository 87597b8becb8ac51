/* Coordinate descent over few values a dimension: fusing rarely interacts with itself, so all combinations would tell
 * little more, and a large model has time for some ten trials only. */
#include "passes/autotune.h"

#include <time.h>

typedef struct Tuner {
    PassContext *pc;
    const Graph *g;
    const Pass *const *passes;
    size_t n_passes;
    CostFn cost;
    void *user;
    double start_ms, budget_ms, slowest_ms; /* of a trial so far */
    double best;
    uint32_t trials;
} Tuner;

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static Code measure(Tuner *t, const PassOptions *options, Arena *arena, double *score) {
    PassContext trial = *t->pc;
    Graph *g;
    trial.arena = arena;
    trial.options = *options;
    trial.remarks = (Remarks){0}; /* of trials nobody wants to read */
    TRY(graph_clone(trial.ctx, t->g, arena, &g));
    for (size_t i = 0; i < t->n_passes; i++) {
        TRY(check_cancelled(trial.ctx));
        TRY(t->passes[i]->run(&trial, g));
    }
    return t->cost(trial.ctx, g, t->user, score);
}

/* Takes the options if they are better than the best so far. */
static Code try_options(Tuner *t, PassOptions options) {
    double begin = now_ms(), score = 0;
    if (t->trials && begin + t->slowest_ms > t->start_ms + t->budget_ms) return CODE_OK;
    Arena arena;
    arena_init(&arena);
    Code code = measure(t, &options, &arena, &score);
    arena_destroy(&arena);
    if (code != CODE_OK) return code;
    if (t->trials == 0 || score < t->best) {
        t->best = score;
        t->pc->options = options;
    }
    t->trials++;
    double took = now_ms() - begin;
    if (took > t->slowest_ms) t->slowest_ms = took;
    return CODE_OK;
}

Code autotune(PassContext *pc, const Graph *g, const Pass *const *passes, size_t n_passes, CostFn cost, void *user,
              double budget_ms) {
    const double alphas[] = {1.0, 0.8, 0.6, 0.4, 0.2, 0.0};
    const int64_t limits[] = {8, 16, 32};
    Tuner t = {
        .pc = pc, .g = g, .passes = passes, .n_passes = n_passes, .cost = cost, .user = user, .budget_ms = budget_ms};
    t.start_ms = now_ms();
    TRY(try_options(&t, pc->options));
    double given = t.best;
    PassOptions options = pc->options;
    for (size_t i = 0; i < sizeof alphas / sizeof *alphas; i++) {
        options.alpha = alphas[i];
        if (options.alpha != pc->options.alpha) TRY(try_options(&t, options));
    }
    options = pc->options;
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        options.fusion_limit = limits[i];
        TRY(try_options(&t, options));
    }
    options = pc->options;
    options.fuse_layout = !options.fuse_layout;
    TRY(try_options(&t, options));
    const PassOptions *best = &pc->options;
    return remark_add(pc, "autotune", -1,
                      "chose alpha %g, fusion limit %lld, layout %s: cost %.1f -> %.1f us in %u trials", best->alpha,
                      (long long)best->fusion_limit, best->fuse_layout ? "on" : "off", given, t.best, t.trials);
}
