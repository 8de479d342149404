/* What vla inspect shows: one row per subject; each has its function in cli/inspect_<file>.c. argv[0] is the subject. */
#ifndef CLI_INSPECT_H
#define CLI_INSPECT_H

#define INSPECTS(X)                                                             \
    X(plan, "memory and FLOPs of a training step at full size, without a device") \
    X(dataset, "what a dataset holds")                                          \
    X(batch, "the samples of a training batch, with their pictures")                     \
    X(checkpoint, "whether checkpoints are whole, and what they hold")                    \
    X(graph, "the model's operations, as built or with the backward pass")

#define X(name, text) int inspect_##name(int argc, char **argv);
INSPECTS(X)
#undef X

#endif
