/* The option table of a training run: one row per key. The structures of config.h, parsing, defaults, ranges, overrides,
 * help and config.resolved.json all expand from these rows, so that they cannot drift apart.
 *
 * X(KIND, key, default, low, high, STATUS, "text")
 *
 * KIND decides the C type of the field that has the key's name:
 *
 *   INT      int64_t                  REAL   double          BOOL  bool
 *   TEXT     const char *, or NULL    PATH   the same; a file or folder of the user
 *   CHOICE   int, index into the names of "a|b|c", which stand before the first ';' of the text. A name with '!' behind
 *            it is known and refused, for the reason that ends the text
 *   DIMS     vlai_dims: ordered map of name to integer       WORDS    vlai_words: ordered map of name to text
 *   WEIGHTS  vlai_weights: ordered map of name to number     NUMBERS  vlai_numbers: list of numbers
 *   TEXTS    vlai_texts: list of texts                       GROUPS   vlai_lr_groups
 *   ANY      const char *: the value as JSON text, not looked into
 *
 * `low` and `high` bound numbers (each entry of a map or list). null always stands for the default.
 *
 * STATUS says what becomes of the value:
 *
 *   WORKS    it acts
 *   QUIET    accepted, and nothing depends on it here (the text says why)
 *   NOTED    the same, with one line of notice when the value differs from the default
 *   ONLY     only the default is accepted; another value is refused for the reason in the text
 *
 * Defaults are those of the reference wherever it has the key. */
#ifndef VLAI_TRAIN_OPTIONS_H
#define VLAI_TRAIN_OPTIONS_H

#include <float.h>
#include <math.h>
#include <stdint.h>

#define VLAI_BIG 1e15 /* no further bound: counts of steps, samples or bytes */

/* Defaults of maps and lists are YAML. */
#define VLAI_DEFAULT_RESOLUTION "{face_view: 256, left_wrist_view: 256, right_wrist_view: 256}"
#define VLAI_DEFAULT_BETAS "[0.9, 0.98]"
#define VLAI_DEFAULT_ADAMW_BETAS "[0.9, 0.999]"

/* ---- top level, with the legacy places of keys that have moved into sections ---- */
#define VLAI_OPTIONS_TOP(X)                                                                                            \
    X(CHOICE, model_type, 0, 0, 0, WORKS, "qwen2_5; the policy: qwen2_5 is Wall-X")                                    \
    X(ANY, dataset_path, NULL, 0, 0, QUIET, "not used by LeRobot sets")                                                \
    X(PATH, norm_stats_path, NULL, 0, 0, WORKS, "old place of data.norm_stats_path, used where that is not given")     \
    X(INT, eval_batch_size_per_gpu, 0, 0, 1000000, WORKS,                                                              \
      "samples per validation batch and rank; 0 = hyperparams.batch_size_per_gpu")                                     \
    X(INT, state_bins, 0, 0, 1000000, WORKS, "old place of data.state_bins, used where that is not given")             \
    X(PATH, save_path, NULL, 0, 0, WORKS, "old place of checkpoint.save_path, used where that is not given")           \
    X(PATH, processor_path, NULL, 0, 0, WORKS, "old place of model.processor_path, used where that is not given")      \
    X(PATH, qwen_vl_act_config_path, NULL, 0, 0, WORKS, "old name of model.config_path, used where that is not given") \
    X(PATH, pretrained_qwen_vl_path, NULL, 0, 0, WORKS, "old name of model.pretrained_path, used where that is not given") \
    X(TEXT, dataset_type, NULL, 0, 0, WORKS, "old place of data.dataset_type")

#define VLAI_OPTIONS_NOISE(X)                                                                                          \
    X(REAL, beta_alpha, 1.5, DBL_MIN, 1e3, WORKS, "first parameter of the Beta distribution that u is drawn from")     \
    X(REAL, beta_beta, 1.0, DBL_MIN, 1e3, WORKS, "second parameter")                                                   \
    X(REAL, s, 0.999, DBL_MIN, 1, WORKS, "flow time is s times the shifted 1 - u")                                     \
    X(REAL, time_shift, 1.0, DBL_MIN, 1e3, WORKS, "k of t = k t / (1 + (k - 1) t)")                                    \
    X(INT, num_inference_timesteps, 0, 0, 100000, WORKS, "Euler steps of a prediction; 0 = as the architecture says")

/* ---- task ---- */
#define VLAI_OPTIONS_TASK(X)                                                                                           \
    X(DIMS, dof_config, NULL, 1, 4096, WORKS, "action layout, in order: name to width")                                \
    X(DIMS, agent_pos_config, NULL, 1, 4096, WORKS, "state layout, in order: name to width")                           \
    X(DIMS, ar_dof_config, NULL, 1, 4096, QUIET, "training does not read it: action tokens follow dof_config")         \
    X(INT, action_horizon, 32, 1, 4096, WORKS, "actions per chunk")                                                    \
    X(INT, action_horizon_flow, 32, 1, 4096, WORKS, "actions per chunk in the model: the same number; another has no effect")              \
    X(BOOL, use_state_string_representation, false, 0, 0, WORKS, "write the state into the prompt as numbers")

/* ---- model ---- */
#define VLAI_OPTIONS_MODEL(X)                                                                                          \
    X(PATH, config_path, NULL, 0, 0, WORKS, "architecture: a config.json, or a folder that holds one")                 \
    X(PATH, processor_path, NULL, 0, 0, WORKS, "folder with tokenizer.json and preprocessor_config.json")              \
    X(PATH, pretrained_path, NULL, 0, 0, WORKS, "folder with Qwen2.5-VL weights for expert 0 and the vision tower")    \
    X(BOOL, attn_deterministic, true, 0, 0, WORKS, "attention backward in a fixed order of sums; false: as perf.attn")  \
    X(REAL, ar_loss_weight, 1.0, 0, 1e6, WORKS, "weight of the cross entropy")                                         \
    X(REAL, flow_loss_weight, 1.0, 0, 1e6, WORKS, "weight of the flow loss")                                           \
    X(BOOL, use_ema, false, 0, 0, ONLY, "averaged weights are not kept here, nor by the reference that has the key")   \
    X(TEXT, attn_implementation, NULL, 0, 0, NOTED, "the architecture file decides the attention masks")               \
    X(TEXT, backbone, "qwen2_5", 0, 0, QUIET, "model_type decides")                                                    \
    X(TEXT, action_tokenizer_type, NULL, 0, 0, WORKS, "fast: its action tokens join the vocabulary")                   \
    X(PATH, action_tokenizer_path, NULL, 0, 0, WORKS, "other place of data.action_tokenizer_path")                     \
    X(PATH, action_tokenizer_checkpoint_path, NULL, 0, 0, ONLY, "it belongs to spatialvla, which is not built")        \
    X(PATH, action_tokenizer_config_dir, NULL, 0, 0, ONLY, "it belongs to spatialvla, which is not built")             \
    X(TEXTS, new_special_tokens, NULL, 0, 0, ONLY, "flow training reads no further tokens, and the reference adds "    \
      "them to only one of its two tokenizers")                                                                        \
    X(BOOL, enable_customized_robot_config, false, 0, 0, NOTED, "nothing reads it; key_mappings names the columns")    \
    X(ANY, customized_robot_config, NULL, 0, 0, NOTED, "nothing reads it; key_mappings names the columns")

/* ---- data ---- */
#define VLAI_OPTIONS_DATA(X)                                                                                           \
    X(CHOICE, dataset_type, 0, 0, 0, WORKS, "lerobot; format of the data sets: LeRobot v2.0, v2.1, v3.0")              \
    X(PATH, norm_stats_path, NULL, 0, 0, WORKS, "q01 and q99 of state and action, as vla norm-stats writes them")      \
    X(REAL, train_test_split, 0.95, DBL_MIN, 1, WORKS, "share of the episodes that train (1: all, and none validates)") \
    X(DIMS, resolution, VLAI_DEFAULT_RESOLUTION, -1, 16384, WORKS, "view to longest side in pixels; -1 or absent = keep") \
    X(INT, num_workers, 4, 0, 1024, WORKS, "decoding threads per rank; 0 decodes in the training thread")              \
    X(WEIGHTS, priority_order, NULL, 0, 1, QUIET, "instruction fields that LeRobot tasks do not have")                 \
    X(WORDS, camera_name_mapping, NULL, 0, 0, WORKS, "view to its name in the prompt")                                 \
    X(CHOICE, padding_side, 0, 0, 0, WORKS, "left|right; side of the pads where data.padding is reference")            \
    X(BOOL, use_fast_tokenizer, false, 0, 0, WORKS,                                                                    \
      "train on the chunk as discrete FAST tokens, by cross entropy, instead of on the flow")                          \
    X(PATH, action_tokenizer_path, NULL, 0, 0, WORKS, "folder of the FAST processor: processor_config.json and tokenizer.json") \
    X(INT, max_length, 768, 1, 1000000, WORKS, "most tokens of a sample; a longer one is an error")                    \
    X(INT, state_bins, 256, 2, 65536, WORKS, "bins of the written state")                                              \
    X(BOOL, use_state_string_representation, false, 0, 0, WORKS, "other place of the task key; wins where both stand") \
    X(INT, action_horizon, 32, 1, 4096, WORKS, "other place of the task key; wins where both stand")                   \
    X(INT, action_horizon_flow, 32, 1, 4096, WORKS, "other place of the task key; wins where both stand")              \
    X(INT, max_pixels, 12845056, 1, VLAI_BIG, NOTED, "training always uses the default, as the reference does")        \
    X(INT, min_pixels, 3136, 1, VLAI_BIG, NOTED, "training always uses the default, as the reference does")            \
    X(INT, image_factor, 28, 1, 4096, NOTED, "training always uses the default, as the reference does")                \
    X(REAL, generate_subtask_ratio, 0.0, 0, 1, NOTED, "LeRobot tasks have no subtasks")                                \
    X(TEXT, model_type, "qwen2_5", 0, 0, QUIET, "the model_type of the top level decides")                             \
    /* ours */                                                                                                         \
    X(CHOICE, padding, 0, 0, 0, WORKS,                                                                                 \
      "packed|reference; packed = no pad tokens; reference = pads to the longest sample, visible as in the reference") \
    X(CHOICE, validation_split, 0, 0, 0, WORKS,                                                                        \
      "episode|frame; what validates: the episodes after the training share, or 5 % of the training episodes' frames, " \
      "as in the reference")                                                                                           \
    X(CHOICE, picture_order, 0, 0, 0, WORKS,                                                                           \
      "mapping|features; order of the pictures: of key_mappings.camera, like their names, or of the data set's features, " \
      "as in the reference")                                                                                           \
    X(BOOL, mask_padded_actions, false, 0, 0, WORKS, "no loss on the actions repeated past the end of an episode")     \
    X(REAL, frame_cache_gb, 0.0, 0, 1e6, WORKS, "size limit of the cache of resized frames; 0 = none")                 \
    X(PATH, frame_cache_dir, NULL, 0, 0, WORKS, "folder of the frame cache; null = inside checkpoint.save_path")

#define VLAI_OPTIONS_LEROBOT(X)                                                                                        \
    X(PATH, repo_id, NULL, 0, 0, WORKS, "folder of the data set, or its name below root or $HF_LEROBOT_HOME (else $HF_HOME/lerobot)") \
    X(PATH, root, NULL, 0, 0, WORKS, "folder of the data set, or one that holds repo_id")                              \
    X(NUMBERS, episodes, NULL, 0, VLAI_BIG, WORKS, "episodes to use; null = all")                                      \
    X(BOOL, skip_missing, false, 0, 0, WORKS, "leave out listed episodes that the set does not have")                  \
    X(BOOL, allow_partial, false, 0, 0, WORKS, "use the longest run of whole episodes from the start when files are "  \
      "missing or damaged, instead of refusing the set")

#define VLAI_OPTIONS_KEYS(X)                                                                                           \
    X(WORDS, camera, NULL, 0, 0, WORKS, "camera column to view name, in the order of the prompt")                      \
    X(TEXT, state, NULL, 0, 0, WORKS, "column of the state")                                                           \
    X(TEXT, action, NULL, 0, 0, WORKS, "column of the action")

#define VLAI_OPTIONS_NORMALIZER(X)                                                                                     \
    X(PATH, customized_action_statistic_dof, NULL, 0, 0, ONLY, "statistics per robot and part are not read here; "     \
      "vla norm-stats writes data.norm_stats_path from the data set")                                                  \
    X(TEXT, min_key, "min", 0, 0, QUIET, "belongs to customized_action_statistic_dof")                                 \
    X(TEXT, delta_key, "delta", 0, 0, QUIET, "belongs to customized_action_statistic_dof")

/* ---- hyperparams ---- */
#define VLAI_OPTIONS_HYPER(X)                                                                                          \
    X(INT, num_epoch, 1, 1, 1000000000, WORKS, "epochs")                                                               \
    X(INT, batch_size_per_gpu, 1, 1, 1000000, WORKS, "samples per micro-batch and rank")                               \
    X(INT, gradient_accumulation_steps, 1, 1, 1000000, WORKS, "micro-batches per step")                                \
    X(INT, seed, 42, 0, 4294967295.0, WORKS, "seed of order, times, noise and new weights")                            \
    X(CHOICE, loss_normalization, 0, 0, 0, WORKS,                                                                      \
      "micro_batch|global; mean of the micro-batches' means, as in the reference, or one mean over all of a step")

#define VLAI_OPTIONS_OPTIMIZER(X)                                                                                      \
    X(CHOICE, optimizer_type, 0, 0, 0, WORKS, "adamw|dmuon!|muon!; optimizer; Muon needs a package of its own in the " \
      "reference and is not written here: use adamw")                                                                  \
    X(REAL, learning_rate, 1e-4, 0, 1e3, WORKS, "peak rate")                                                           \
    X(REAL, max_grad_norm, 1.0, DBL_MIN, 1e15, WORKS, "bound of the gradient's norm")                                  \
    X(BOOL, enable_grad_clip, true, 0, 0, WORKS, "scale the gradient down to that bound")                              \
    X(GROUPS, lr_groups, NULL, 0, 1e3, WORKS, "list of {name, lr, include: [parts of parameter names], fail_on_empty}") \
    X(BOOL, train_action_expert_only, false, 0, 0, WORKS, "freeze every parameter that no group takes")                \
    X(REAL, action_expert_learning_rate, NAN, 0, 1e3, WORKS, "older form: rate of one group, named action_lr_group")   \
    X(TEXTS, action_lr_keywords, NULL, 0, 0, WORKS, "parts of the names in that group")                                \
    X(NUMBERS, betas, VLAI_DEFAULT_BETAS, 0, 1 - DBL_EPSILON, WORKS, "decay of the two moments")                       \
    X(REAL, weight_decay, 1e-8, 0, 1e3, WORKS, "decoupled decay, on every parameter")                                  \
    X(REAL, eps, 1e-8, DBL_MIN, 1e3, WORKS, "added to the root of the second moment")                                        \
    X(BOOL, fused, true, 0, 0, QUIET, "OPTIMIZER_FUSED chooses; the numbers are the same")                             \
    X(BOOL, foreach, false, 0, 0, QUIET, "a choice between PyTorch's kernels")                                         \
    X(REAL, muon_lr, 0.02, 0, 1e3, QUIET, "belongs to dmuon")                                                          \
    X(REAL, momentum, 0.95, 0, 1, QUIET, "belongs to dmuon")                                                           \
    X(INT, ns_steps, 5, 0, 1000, QUIET, "belongs to dmuon")                                                            \
    X(REAL, muon_weight_decay, 0.0, 0, 1e3, QUIET, "belongs to dmuon")                                                 \
    X(REAL, adamw_lr, 1e-3, 0, 1e3, QUIET, "belongs to dmuon")                                                         \
    X(NUMBERS, adamw_betas, VLAI_DEFAULT_ADAMW_BETAS, 0, 1, QUIET, "belongs to dmuon")                                 \
    X(REAL, adamw_weight_decay, 0.01, 0, 1e3, QUIET, "belongs to dmuon")                                               \
    X(REAL, adamw_eps, 1e-8, 0, 1e3, QUIET, "belongs to dmuon")                                                        \
    X(TEXT, ns_backend, "gram", 0, 0, QUIET, "belongs to dmuon")                                                       \
    X(TEXT, ns_coefficients, "default", 0, 0, QUIET, "belongs to dmuon")                                               \
    X(BOOL, nesterov, true, 0, 0, QUIET, "belongs to dmuon")

#define VLAI_OPTIONS_SCHEDULER(X)                                                                                      \
    X(CHOICE, scheduler_type, 0, 0, 0, WORKS, "cosine|constant|step!; course of the rate; the reference's trainer "    \
      "refuses step as well: use cosine or constant")                                                                  \
    X(INT, num_training_steps, 0, 0, VLAI_BIG, WORKS, "stop after so many steps; 0 = by num_epoch (not with cosine)")  \
    X(INT, num_warmup_steps, 0, 0, VLAI_BIG, WORKS, "steps of linear rise (cosine)")                                   \
    X(REAL, min_lr, NAN, 0, 1e3, WORKS, "rate at the end (cosine); null = a tenth of learning_rate")                   \
    X(INT, step_size, 10000, 1, VLAI_BIG, QUIET, "belongs to step")                                                    \
    X(REAL, gamma, 0.1, 0, 1e3, QUIET, "belongs to step")

/* ---- distributed ---- */
#define VLAI_OPTIONS_DISTRIBUTED(X)                                                                                    \
    X(BOOL, use_fsdp, false, 0, 0, QUIET, "either way ranks shard the optimizer's state (--zero) and keep weights whole") \
    X(CHOICE, fsdp_sharding_strategy, 0, 0, 0, QUIET,                                                                  \
      "full_shard|shard_grad_op|no_shard|hybrid_shard|_hybrid_shard_zero2; --zero decides what is sharded")            \
    X(INT, fsdp_hsdp_replicate_size, 0, 0, 1000000, QUIET, "belongs to hybrid_shard")                                  \
    X(BOOL, fsdp_cpu_offload, false, 0, 0, ONLY, "nothing is moved to host memory; memory.recompute saves memory")     \
    X(CHOICE, fsdp_reduce_dtype, 0, 0, 0, WORKS, "bf16|fp32|fp16; fp32 with use_fsdp: the same as dist.gradient_dtype: fp32, where that is not given") \
    X(BOOL, use_mixed_precision, true, 0, 0, ONLY, "training.numerics: fp32 trains without mixed precision")           \
    X(BOOL, bf16, true, 0, 0, ONLY, "fp16 is not written here; training.numerics chooses fp32 or bf16")                \
    X(BOOL, use_amp, false, 0, 0, ONLY, "autocast is PyTorch's; training.numerics chooses fp32 or bf16")               \
    X(BOOL, use_gradient_checkpointing, false, 0, 0, WORKS, "the same as memory.recompute: layer")                     \
    X(BOOL, use_selective_recompute, false, 0, 0, WORKS, "the same as memory.recompute: cheap")                        \
    X(BOOL, find_unused_parameters, false, 0, 0, QUIET, "the plan knows which parameters get a gradient")              \
    X(BOOL, broadcast_buffers, true, 0, 0, QUIET, "there are no buffers to send")                                      \
    X(INT, bucket_cap_mb, 25, 1, 1000000, WORKS, "MB of a gradient bucket; with WALLX_PERF_DDP WALLX_PERF_BUCKET or perf.bucket says it") \
    X(TEXT, fsdp_backward_prefetch, "backward_pre", 0, 0, QUIET, "nothing reads it")                                   \
    X(BOOL, fsdp_use_orig_params, true, 0, 0, QUIET, "nothing reads it")                                               \
    X(BOOL, fsdp_limit_all_gathers, true, 0, 0, QUIET, "nothing reads it")                                             \
    X(BOOL, fsdp_forward_prefetch, false, 0, 0, QUIET, "nothing reads it")                                             \
    X(BOOL, fsdp_sync_module_states, true, 0, 0, QUIET, "nothing reads it")                                            \
    X(TEXT, fsdp_save_policy, "full", 0, 0, QUIET, "checkpoints are always whole")                                     \
    X(BOOL, use_gradient_checkpointing_offload, false, 0, 0, ONLY, "nothing is moved to host memory")

/* ---- logging ---- */
#define VLAI_OPTIONS_LOGGING(X)                                                                                        \
    X(TEXT, log_name, "exp", 0, 0, WORKS, "name of the run in its report")                                             \
    X(TEXT, log_project, "wallx", 0, 0, QUIET, "belongs to wandb")                                                     \
    X(TEXT, log_entity, NULL, 0, 0, QUIET, "belongs to wandb")                                                         \
    X(BOOL, use_wandb, true, 0, 0, QUIET, "nothing is sent anywhere: metrics.jsonl and report.html are written")       \
    X(BOOL, wandb_offline, false, 0, 0, QUIET, "nothing is sent anywhere")                                             \
    X(INT, log_interval, 1, 1, VLAI_BIG, WORKS, "steps between lines on the terminal")                                 \
    X(INT, save_interval, 1000, 1, VLAI_BIG, WORKS, "steps between checkpoints")                                       \
    X(INT, val_interval, 4000, 1, VLAI_BIG, WORKS, "steps between validations")                                        \
    X(INT, epoch_save_interval, 1, 1, VLAI_BIG, WORKS, "epochs between checkpoints at the end of an epoch")            \
    X(INT, gc_interval_steps, 1000, 0, VLAI_BIG, QUIET, "there is no garbage collector")                               \
    X(INT, ignore_until_interval, 0, 0, VLAI_BIG, WORKS, "no checkpoint and no validation before this step")           \
    X(INT, loss_log_smooth_window, 1, 1, 1000000, WORKS, "steps that printed losses are averaged over")                \
    /* ours */                                                                                                         \
    X(INT, param_norm_interval, 100, 0, VLAI_BIG, WORKS, "steps between norms of the weights in metrics.jsonl, the "   \
      "first in step 1; 0 = none")

/* ---- checkpoint ---- */
#define VLAI_OPTIONS_CHECKPOINT(X)                                                                                     \
    X(PATH, save_path, "./ckpt", 0, 0, WORKS, "run folder: checkpoints, metrics.jsonl, report.html")                   \
    X(BOOL, validate_first, false, 0, 0, WORKS, "validate before the first step")                                      \
    X(PATH, resume_from, NULL, 0, 0, WORKS, "checkpoint or run folder (go on), or a weights file (start at step 0)")   \
    X(ANY, resume_model, NULL, 0, 0, QUIET, "nothing reads it, as in the reference: resume_from restores everything")  \
    X(ANY, resume_optimizer, NULL, 0, 0, QUIET, "as resume_model")                                                     \
    X(ANY, resume_scheduler, NULL, 0, 0, QUIET, "as resume_model")                                                     \
    X(ANY, resume_ema, NULL, 0, 0, QUIET, "as resume_model")                                                           \
    X(ANY, resume_rng, NULL, 0, 0, QUIET, "as resume_model")                                                           \
    X(ANY, resume_data, NULL, 0, 0, QUIET, "as resume_model")                                                          \
    X(ANY, resume_step, NULL, 0, 0, QUIET, "as resume_model")                                                          \
    /* ours */                                                                                                         \
    X(INT, keep_last, 0, 0, 1000000, WORKS, "checkpoints kept; older ones are deleted; 0 = all")                       \
    X(INT, max_bad_steps, 10, 1, 1000000, WORKS, "stop after so many steps in a row with a loss that is not finite")

/* ---- debug ---- */
#define VLAI_OPTIONS_DEBUG(X)                                                                                          \
    X(BOOL, profile, false, 0, 0, NOTED, "metrics.jsonl holds the times of each step; profile from outside with perf") \
    X(PATH, profile_save_path, "./profile", 0, 0, QUIET, "belongs to profile")                                         \
    X(INT, profile_wait_iters, 1, 0, VLAI_BIG, QUIET, "belongs to profile")                                            \
    X(INT, profile_warmup_iters, 1, 0, VLAI_BIG, QUIET, "belongs to profile")                                          \
    X(INT, profile_active_iters, 3, 0, VLAI_BIG, QUIET, "belongs to profile")                                          \
    X(BOOL, show_time_details, false, 0, 0, QUIET, "metrics.jsonl always holds the times of each step")                \
    X(BOOL, visualize_sample, false, 0, 0, NOTED, "vla inspect batch shows one, with its pictures")                    \
    X(PATH, save_debug_batch_path, NULL, 0, 0, NOTED, "vla inspect batch writes one, with its pictures")               \
    X(BOOL, nvtx, false, 0, 0, QUIET, "ranges for a GPU's profiler")                                                   \
    X(BOOL, enable_mfu, false, 0, 0, QUIET, "metrics.jsonl always holds TFLOP/s")                                     \
    X(BOOL, enable_mfu_profile, false, 0, 0, QUIET, "metrics.jsonl always holds TFLOP/s")

/* ---- ours ---- */
#define VLAI_OPTIONS_TRAINING(X)                                                                                       \
    X(TEXT, device, "auto", 0, 0, WORKS, "cpu, cuda, cuda:N, or auto: the first GPU where this build can use one")     \
    X(CHOICE, numerics, 0, 0, 0, WORKS, "auto|fp32|bf16|bf16-sr|bf16-plain; precision; auto = fp32 on a CPU, bf16 on " \
      "a GPU; bf16: fp32 masters and moments; bf16-sr: weights and moments in bf16, rounded stochastically; "          \
      "bf16-plain: to nearest")                                                                                        \
    X(INT, threads, 0, 0, 4096, WORKS, "computing threads; 0 = one per core")

#define VLAI_OPTIONS_MEMORY(X)                                                                                         \
    X(CHOICE, recompute, 0, 0, 0, WORKS, "none|cheap|layer|auto; what the backward computes again instead of keeping " \
      "it: nothing, norms and products, or whole layers; auto: the least of these that fits. Not given: none; with "   \
      "WALLX_PERF_ALLOC cheap, and on a GPU layer where cheap does not fit. Chosen so, with room to spare cheap keeps some of its " \
      "values after all, and layer its last layers")                                                                   \
    X(REAL, device_gb, 0, 0, 1e6, WORKS, "most memory of the device that the run may take, in GB of 10^9 bytes; on a " \
      "CPU it is no limit, only what recompute auto goes by; 0 = all that is free")                                                \
    X(REAL, keep_gb, 0, 0, 1e6, WORKS, "most GB of values that are kept although recompute would make them again: with cheap some " \
      "of its values, with layer its last layers. auto takes as much of it as there is room for, a level that is given takes all. 0 = on " \
      "one rank all the room that there is, but with cheap none in bf16-sr and bf16-plain; on several, without device_gb, none")

/* Several ranks. On one nothing of it has an effect. */
#define VLAI_OPTIONS_DIST(X)                                                                                           \
    X(INT, zero, 1, 0, 1, WORKS, "1: every rank keeps and steps its share of the optimizer's state; 0: all of it")      \
    X(CHOICE, gradient_dtype, 0, 0, 0, WORKS, "auto|bf16|fp32; what gradients are summed over ranks in; auto = the "    \
      "type they are kept in: bf16 for weights in bf16, fp32 with accumulation and for weights in fp32")                \
    X(INT, product_sms_free, 0, 0, 64, WORKS, "multiprocessors of a GPU that matrix products leave free while collectives run "  \
      "beside them (WALLX_PERF_DDP); 0 = none")                                                                        \
    X(INT, timeout_s, 300, 1, 1000000, WORKS, "VLA_DIST_TIMEOUT: most seconds that ranks wait for another one")

/* The switches of the environment, for those who keep settings in files: a variable that is set wins over its key. */
#define VLAI_OPTIONS_PERF(X)                                                                                           \
    X(BOOL, attn, false, 0, 0, WORKS, "WALLX_PERF_ATTN: cuDNN's attention where it is faster than own kernels")         \
    X(BOOL, alloc, false, 0, 0, WORKS, "WALLX_PERF_ALLOC: offsets planned by lifetime, cheap recompute")               \
    X(BOOL, ddp, false, 0, 0, WORKS, "WALLX_PERF_DDP: gradients reduced bucket by bucket while the backward runs")      \
    X(INT, bucket, 100, 1, 1000000, WORKS, "WALLX_PERF_BUCKET: MB of such a bucket; without perf.ddp distributed.bucket_cap_mb")  \
    X(BOOL, compile, false, 0, 0, WORKS, "WALLX_PERF_COMPILE: fused kernels and replay, decoder")                      \
    X(BOOL, compile_visual, false, 0, 0, WORKS, "WALLX_PERF_COMPILE_VISUAL: fused kernels, vision tower")              \
    X(INT, compile_recomp_limit, 64, 2, 1000000, WORKS, "WALLX_PERF_COMPILE_RECOMP_LIMIT: most plans kept")            \
    X(BOOL, optimizer_fused, false, 0, 0, WORKS, "OPTIMIZER_FUSED: one pass over all parameters")                      \
    X(BOOL, no_timer_barrier, false, 0, 0, WORKS, "WALLX_PERF_NO_TIMER_BARRIER: the next step begins before the times of this one are read") \
    X(BOOL, log, false, 0, 0, WORKS, "WALLX_PERF_LOG: one line per switch that is on")

/* Section path, member of vlai_config, rows. A section's path is a key of its parent. */
#define VLAI_SECTIONS(S)                                              \
    S("", top, VLAI_OPTIONS_TOP)                                      \
    S("task", task, VLAI_OPTIONS_TASK)                                \
    S("task.noise_scheduler", task_noise, VLAI_OPTIONS_NOISE)         \
    S("model", model, VLAI_OPTIONS_MODEL)                             \
    S("data", data, VLAI_OPTIONS_DATA)                                \
    S("data.lerobot_config", lerobot, VLAI_OPTIONS_LEROBOT)           \
    S("data.key_mappings", keys, VLAI_OPTIONS_KEYS)                   \
    S("data.normalizer_config", normalizer, VLAI_OPTIONS_NORMALIZER)  \
    S("data.noise_scheduler", noise, VLAI_OPTIONS_NOISE)              \
    S("hyperparams", hyperparams, VLAI_OPTIONS_HYPER)                 \
    S("hyperparams.optimizer", optimizer, VLAI_OPTIONS_OPTIMIZER)     \
    S("hyperparams.scheduler", scheduler, VLAI_OPTIONS_SCHEDULER)     \
    S("distributed", distributed, VLAI_OPTIONS_DISTRIBUTED)           \
    S("logging", logging, VLAI_OPTIONS_LOGGING)                       \
    S("checkpoint", checkpoint, VLAI_OPTIONS_CHECKPOINT)              \
    S("debug", debug, VLAI_OPTIONS_DEBUG)                             \
    S("training", training, VLAI_OPTIONS_TRAINING)                    \
    S("memory", memory, VLAI_OPTIONS_MEMORY)                          \
    S("dist", dist, VLAI_OPTIONS_DIST)                                \
    S("perf", perf, VLAI_OPTIONS_PERF)

#endif
