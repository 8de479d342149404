/* What a command is writing goes when SIGINT, SIGTERM or SIGHUP ends it.
 *
 *     interrupt_removes("set.tmp-123");
 *     ...
 *     interrupt_keeps();                  // it is whole
 */
#ifndef CLI_INTERRUPT_H
#define CLI_INTERRUPT_H

/* From now on these signals remove `path`, a file or a folder with all in it, and then end the process as they do without. Ones that
 * the parent has told this process to ignore stay ignored. Called once; without memory or threads to be had nothing changes. */
void interrupt_removes(const char *path);
void interrupt_keeps(void);
/* Where such a signal has come, waits for the end that it brings: what failed meanwhile failed because of it. */
void interrupt_yield(void);

#endif
