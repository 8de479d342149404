/* Metadata from memory, so that the fuzzer can feed it bytes. */
#ifndef VLAI_EPISODES_H
#define VLAI_EPISODES_H

#include "data/set.h"

VLA_BEGIN_DECLS

/* meta/info.json; text that is no JSON object is an error, everything else a finding. */
vla_status vlai_info_parse(vla_dataset *set, const char *data, size_t size, vlai_findings *findings, vla_error *err);
/* meta/episodes.jsonl into set->episodes; the set's version, cameras and totals are known. */
vla_status vlai_episodes_parse(vla_dataset *set, const char *data, size_t size, vlai_findings *findings, vla_error *err);

VLA_END_DECLS

#endif
