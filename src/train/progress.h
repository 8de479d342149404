/* Words for progress: the reference's step line, a status line for a terminal, the memory table. Formatting only; the
 * program prints. */
#ifndef VLAI_PROGRESS_H
#define VLAI_PROGRESS_H

#include "base/text.h"
#include "vla/trainer.h"

VLA_BEGIN_DECLS

/* " epoch   0/100 | iter      3/ 16238 | loss 0.301234 | flow_loss 0.301234 | lr 0.000003 | time_current_backward_step
 * 0.859000s |": the reference's fields, widths and order, for tools that read its logs. */
void vlai_step_line(const vla_record *record, char *out, size_t size);
/* One line that is drawn over itself: step, loss, rate, gradient norm, samples/s, stall, memory, time left. */
void vlai_status_line(const vla_record *record, char *out, size_t size);
/* "[Validation] step N | val_loss x.xxxx | val_flow_loss x.xxxxxx" */
void vlai_validation_line(const vla_record *record, char *out, size_t size);
/* One line per item in MB. */
void vlai_memory_table(const vla_trainer_memory *memory, vlai_text *out);

VLA_END_DECLS

#endif
