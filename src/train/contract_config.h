/* The contract that a training configuration asks for, and its tokenizer.
 *
 *     vlai_tokenizer *tok;
 *     vlai_contract contract;
 *     VLA_TRY(vlai_config_tokenizer(config, &tok, err));                  // processor, with <|propri|> and <|action|>
 *     VLA_TRY(vlai_config_contract(config, tok, &contract, err));         // statistics are read
 *     VLA_TRY(vlai_contract_check_set(&contract, set, &notes, err));
 */
#ifndef VLAI_CONTRACT_CONFIG_H
#define VLAI_CONTRACT_CONFIG_H

#include "data/contract.h"
#include "data/flow_time.h"
#include "train/config.h"

VLA_BEGIN_DECLS

/* Names in a checkpoint of the two files of a FAST processor. */
#define VLAI_FAST_CONFIG_FILE "fast_processor_config.json"
#define VLAI_FAST_TOKENIZER_FILE "fast_tokenizer.json"
/* The folder of the FAST processor; NULL when nothing asks for one. */
const char *vlai_config_fast_path(const vlai_config *config);
/* The FAST processor of data.use_fast_tokenizer or model.action_tokenizer_type; *out is NULL when neither asks for one. */
vla_status vlai_config_fast(const vlai_config *config, vlai_fast **out, vla_error *err);
/* With <|action_token_i|> where a FAST processor is asked for. */
vla_status vlai_config_tokenizer(const vlai_config *config, vlai_tokenizer **out, vla_error *err);
/* The padded layout's cut of long prompts stays off: set contract.truncate to have it. */
vla_status vlai_config_contract(const vlai_config *config, const vlai_tokenizer *tok, vlai_contract *out, vla_error *err);
/* The layout that a key of the section `task` gives; errors name its place. Released with vlai_layout_fini. */
vla_status vlai_config_layout(const vlai_config *config, const char *key, const vlai_dims *dims, vlai_layout *out, vla_error *err);
/* Opens the data set in `root` as data.lerobot_config says: damaged or missing parts allowed or not, and, with `chosen`, its
 * episodes alone. */
vla_status vlai_config_open_set(const vlai_config *config, const char *root, bool chosen, vla_dataset **out, vla_error *err);
vlai_flow_time vlai_config_flow_time(const vlai_config *config);

VLA_END_DECLS

#endif
