"""Names of settings and options in nanoGPT, litgpt, Hugging Face and others, with ours."""

FLASH = """
    flash flash_attn flash_attention flash_attention_2 use_flash use_flash_attn use_flash_attention attn_flash
    use_flash_attention_2 enable_flash_attn enable_flash_attention use_sdpa attn_implementation
    attention_implementation attn_impl attention_backend
"""
PROCESSES = """
    workers num_workers n_workers dataloader_num_workers num_proc preprocessing_num_workers n_jobs num_jobs max_workers
"""
A_FILE = "config config_file config_path cfg"
A_SHAPE = "model_type model_name config_name model.name"

# {ours: their names}. Ours are settings, of which the first that a command has is named; after a colon a word on the
# difference. Before a bare colon is none: the words after it are the way here.
NAMES = {
    # Text
    "data.path: a file, a folder or a glob; data= names a source": "dataset train_dataset dataset_path",
    "data.name: of data=hf": "dataset_name hf_dataset",
    "data.subset: of data=hf": "dataset_config dataset_config_name dataset_subset",
    "data: data=hf streams a data set of Hugging Face, once": "streaming",
    "data.path": """
        data_dir data_path data_file data_root train_data train_file train_path train_data_path train_bin training_data
        training_file input_bin corpus
    """,
    "data.path prompts": "input_file",
    "prompt_file data.path": "file prompt_path",
    "data.val_path": """
        validation_file val_file val_data val_data_path val_bin val_data_dir input_val_bin eval_file eval_data
        validation_data valid_file valid_data_path
    """,
    "data.val_fraction": """
        validation_split val_split_fraction val_split val_ratio val_size valid_size validation_fraction validation_size
        test_size test_split holdout eval_split_ratio
    """,
    "data.val_fraction: 0.1 holds out 10%": "validation_split_percentage",
    "data.path: a file without the test, which eval.py data.path=FILE scores; docs/data.md divides a text": (
        "test_fraction test_ratio test_path test_file test_data test_dataset test_set test_bin train_test_split splits"
    ),
    "data.val_path: a file of other groups, as docs/data.md divides records by a field": """
        group_by group_by_field group_field group_column group_col group_key group_split group_kfold split_by
        data.group
    """,
    "data.val_path: each fold in its turn, as docs/data.md divides a text; no seed changes the held-out part": """
        k_fold kfold k_folds n_folds num_folds n_splits fold folds cv cv_folds cross_validation cross_val data.fold
        data.folds data.k_fold split_seed val_seed validation_seed test_seed data.seed data.split_seed data.val_seed
        data.random_state
    """,
    "data.text_field": "text_column text_column_name text_key",
    "data.path: a shorter file, as head -n 1000 FILE writes it": (
        "max_train_samples max_samples max_examples max_documents num_examples sample_size limit limit_train_batches"
    ),
    "data.path: a shorter file, as head -c 1000000 FILE writes it": (
        "fraction data_fraction train_fraction dataset_fraction max_bytes max_train_tokens"
    ),
    "data.val_path: a folder or a glob, whose files are one text; docs/generation.md scores each by itself": (
        "val_files validation_files val_datasets eval_datasets"
    ),
    "data.path: a file in lower case, which docs/data.md makes": (
        "lowercase lower_case do_lower_case lower uncased text_cleaners"
    ),
    "data.path: a file without them, which docs/data.md makes": """
        pii remove_pii redact_pii scrub_pii mask_pii pii_masking pii_redaction redact anonymize anonymise deidentify
        remove_emails mask_emails
    """,
    "data.path: a file in one form, such as NFC, which docs/data.md makes": """
        normalize normalise normalizer unicode_normalization unicode_normalize normalization_form
        normalization_rule_name nfc nfd nfkc
    """,
    "seed: the windows are always shuffled, by it; init_from=RUN learns one text after another": (
        "shuffle shuffle_data should_shuffle dataset_shuffle train_dataloader_shuffle"
    ),
    "seed: one for the initial weights, the order of the text and the dropout": (
        "data_seed shuffle_seed sampler_seed init_seed model_seed weight_seed dropout_seed"
    ),
    "seed": "random_seed rng_seed manual_seed seed_everything",
    "seed: of the weights, the order and the dropout; it does not change the held-out part": "random_state",
    "data.val_path: the same file as data.path, of a few hundred letters, is learned by heart": (
        "overfit_batches overfit_one_batch overfit_single_batch overfit"
    ),
    "data.path: each of its words counts, those of questions too; there is no loss on answers alone": """
        train_on_prompt train_on_prompts train_on_inputs mask_prompt mask_inputs mask_user_labels completion_only_loss
        assistant_only_loss answer_only_loss train_on_responses_only prompt_loss_weight loss_on_prompt train_on_input
        dataset.train_on_input loss_mask mask_history response_template roles_to_train train_on_turn
    """,
    "data.text_field: one field is the text; docs/data.md makes it of several, or of the turns of a conversation": """
        chat_template prompt_template instruction_template field_messages messages_field messages_key messages_column
        conversation_column instruction_column input_column output_column prompt_column response_column column_map
        column_mapping text_columns
    """,
    "data.document_mask: documents follow one another in a window, without padding; true keeps them apart": """
        packing packed sample_packing group_by_length pad_to_max_length padding pad_token pad_token_id
        reset_attention_mask reset_position_ids document_masking
    """,
    "data.path: a folder, without its hidden files, or a quoted glob; docs/data.md copies a folder without some": """
        exclude exclude_dirs exclude_patterns include include_patterns glob ignore ignore_dirs ignore_patterns
        skip_files file_pattern file_extensions
    """,
    "data.path: text in UTF-8; for a file in another encoding the message has the command that converts it": (
        "encoding file_encoding text_encoding charset"
    ),
    "data.split data.path: of a data set, or the file or folder of one; docs/generation.md scores the training text": (
        "split"
    ),
    "tokenizer": """
        tokenizer_name tokenizer_type tokenizer_dir tokenizer_path tokenizer_model tokenizer_file vocab_source
        vocab_file merges_file
    """,
    "tokenizer: byte has a token for each digit, bpe joins up to three": "split_digits individual_digits",
    "tokenizer: none has unknown letters, a new one is its bytes; <|endoftext|> is the only special token": """
        unk_token unk_id character_coverage byte_fallback special_tokens additional_special_tokens add_special_tokens
        user_defined_symbols add_tokens new_tokens added_tokens control_codes control_tokens
    """,
    ": a text is prepared once, and then read without other processes": """
        workers num_workers n_workers dataloader_num_workers num_proc preprocessing_num_workers pin_memory
        dataloader_pin_memory prefetch_factor persistent_workers dataloader_persistent_workers
        dataloader_prefetch_factor dataloader_drop_last drop_last
    """,
    # Model; ours too, without their group, for the commands that do not have it
    "model checkpoint: tiny, small, llama, or gpt2 to gpt2_xl; init_from=hf:NAME begins with trained weights": A_SHAPE,
    "model.n_layer": "n_layer depth n_layers num_layers num_hidden_layers n_blocks num_blocks nlayers",
    "model.n_embd": """
        n_embd d_model dim embed_dim hidden_size model_dim embedding_dim embedding_size emb_dim hidden_dim n_embed width
    """,
    "model.n_embd: the width itself, such as 64 for each layer": "aspect_ratio",
    "model.n_head": "n_head n_heads num_heads num_attention_heads heads num_head nhead attention_heads",
    "model.n_kv_head": (
        "n_kv_head n_kv_heads num_key_value_heads num_kv_heads kv_heads attn_kv_heads n_query_groups num_query_groups "
        "multi_query_group_num gqa_groups n_kv_groups num_kv_groups kv_groups"
    ),
    "model.n_kv_head: 1 is multi-query attention, another divisor of model.n_head grouped-query": (
        "attn_one_kv_head multi_query multi_query_attention group_query_attention grouped_query_attention one_kv_head"
    ),
    "model.block_size": """
        block_size seq_len seq_length max_seq_len max_seq_length sequence_length max_sequence_length context
        context_length context_size context_window ctx ctx_len ctx_size n_ctx t max_position_embeddings n_positions
        max_model_len bptt
    """,
    "model.block_size: the tokens of a window; a longer document is learned to its end, in several windows": (
        "max_source_length max_input_length max_train_seq_length model_max_length cutoff_len truncation"
    ),
    "stride model.block_size: windows of training follow one another, each epoch from another place of the text on": (
        "window_stride train_stride data_stride doc_stride stride_length overlap window_overlap chunk_overlap"
    ),
    "model.head_size": "head_dim attn_dim_head dim_head d_head kv_channels",
    "model.head_size: of queries, keys and values alike; docs/attention.md has a layer of your own": (
        "qk_head_dim qk_dim d_qk key_dim kdim v_head_dim value_dim vdim"
    ),
    "model.n_embd: the width of all layers, whose number is model.n_layer; model.n_inner is that of their MLPs": (
        "hidden_sizes hidden_dims hidden_layer_sizes layer_sizes layer_widths"
    ),
    "model.n_inner: one for all layers; docs/library.md has a model with parts of your own": (
        "mlp_size_layerlist mlp_sizes intermediate_sizes ffn_hidden_sizes ffn_multipliers"
    ),
    "model.n_head: one for all layers; docs/library.md has a model with parts of your own": (
        "n_head_layerlist n_heads_per_layer num_heads_per_layer"
    ),
    "model.n_kv_head: one for all layers": "n_kv_group_layerlist num_key_value_heads_per_layer",
    "model.n_inner": "d_ff intermediate_size ffn_hidden_size ffn_dim ff_dim mlp_dim dim_feedforward",
    "model.n_inner: the width itself; when null 4 × model.n_embd, or for swiglu about 8/3 of it": (
        "ff_mult mlp_ratio multiple_of ffn_dim_multiplier expansion_factor expansion_ratio"
    ),
    "tokenizer.vocab_size: the number that bpe learns; model.vocab_size adds rows to the embedding": (
        "vocab_size vocabulary_size"
    ),
    "model.vocab_size: rows of the embedding; tokenizer.vocab_size is the number that bpe learns": """
        n_vocab padded_vocab_size pad_vocab_size_to make_vocab_size_divisible_by padding_multiple pad_to_multiple_of
        pad_vocab_size_multiple
    """,
    "model.mlp: swiglu, relu2, gelu or gelu_tanh": """
        mlp hidden_act hidden_activation activation activation_function act_fn mlp_type mlp_class_name ffn_type swiglu
        use_swiglu squared_relu ff_glu ff_swish ff_relu_squared gelu_approximate relu_squared swish glu
    """,
    "model.norm: rmsnorm or layernorm": """
        normalization normalization_type norm_type norm_class_name layer_norm rms_norm use_rmsnorm use_rms_norm
        use_scalenorm
    """,
    "model.norm: it comes before attention and MLP; docs/library.md has a block with norms after them": """
        norm_first pre_norm prenorm pre_ln post_norm postnorm post_ln norm_position norm_placement normalize_before
        do_layer_norm_before use_post_layernorm sandwich_norm post_attention_norm post_mlp_norm
        apply_residual_connection_post_layernorm
    """,
    "model.norm_eps": """
        rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_epsilon rms_norm_epsilon scalenorm_epsilon
    """,
    "model.bias: of all but queries, keys and values, whose is model.qkv_bias": """
        mlp_bias use_bias linear_bias add_bias_linear disable_bias_linear ff_no_bias no_bias enable_bias
        use_bias_in_norms
    """,
    "model.qkv_bias: model.bias is that of the other matrices": (
        "attention_bias attn_bias use_qkv_bias add_qkv_bias use_bias_in_attn_linear"
    ),
    "model.qk_norm": "qk_norm use_qk_norm qk_layernorm attn_qk_norm qk_ln norm_qk norm_qk_type",
    "model.tie_embeddings: false by default": """
        tie_word_embeddings tie_embedding tie_weights weight_tying no_weight_tying untie_embeddings
        untie_embeddings_and_output_weights tie_token_emb
    """,
    "model.position: rope, pope, learned, alibi or none": """
        pos_emb pos_embedding pos_encoding position_encoding position_embedding position_embedding_type
        positional_encoding positional_embedding rope use_rope rotary use_rotary rotary_pos_emb
        use_rotary_position_embeddings alibi use_alibi alibi_pos_bias use_abs_pos_emb no_position_embedding
        learned_pos_emb
    """,
    "model.rope_theta": "rope_theta rope_base rotary_base rotary_emb_base rope_freq_base rotary_theta",
    "model.rope_fraction": "rotary_pct rotary_percent rotary_percentage partial_rotary_factor",
    "model.rope_scaling: linear, yarn or llama3, by model.rope_scaling_factor": (
        "use_rope_scaling rope_scaling_type rope_type rope_parameters rope_condense_ratio rope_adjustments"
    ),
    "model.rope_scaling_factor: with model.rope_scaling=linear, yarn or llama3": """
        rotary_scaling_factor rotary_interpolation_factor rotary_seq_len_interpolation_factor rope_factor rope_pi_ratio
    """,
    "model.rope_trained_length": "original_max_position_embeddings",
    "model.attention_window: of all layers, or of those with +window, as in attention=sdpa+window/sdpa": """
        attention_window attn_window sliding_window sliding_window_size use_sliding_window window window_size
        local_window
    """,
    "model.attention_window: one for all layers with +window; attention=sdpa+window/sdpa has it in each second": (
        "window_size_layerlist window_sizes sliding_windows"
    ),
    "model.dropout": """
        dropout dropout_rate drop_rate dropout_prob resid_dropout resid_pdrop embd_pdrop emb_dropout embedding_dropout
        ff_dropout hidden_dropout hidden_dropout_prob emb_pdrop
    """,
    "model.dropout: of channels; there is none of whole layers": (
        "layer_dropout layerdrop drop_path drop_path_rate stochastic_depth"
    ),
    "model.attention_dropout": "attn_dropout attn_pdrop attention_dropout_prob attention_probs_dropout_prob",
    "model.logit_softcap": "final_logit_softcap final_logit_softcapping logit_soft_cap logits_softcap",
    "model.score_softcap: with attention=softcap": (
        "attn_logit_softcapping attn_softcap attention_softcap attention_logit_softcapping"
    ),
    "model.latent_size: with attention=mla": "kv_lora_rank latent_attention",
    "attention": "attn_type attention_type attention.type",
    "attention: a pattern over the layers, such as sdpa+window/sdpa with model.attention_window=32": """
        attention_config attention_pattern attn_config layer_types window_pattern sliding_window_pattern
        max_window_layers sliding_window_indices attention_layerlist attention_variant_layerlist
    """,
    "attention: sdpa/sdpa/sdpa/sdpa+nope has no positions in each fourth layer": (
        "no_rope_layers no_rope_layer_interval no_rope_freq"
    ),
    "attention: softmax1 lets a head attend to nothing, and sdpa+sink to a trained sink": """
        attn_softmax_off_by_one softmax_type attention_sinks sinks attn_num_mem_kv num_memory_tokens num_mem_kv
        head_learned_sink
    """,
    "attention: attention=k_eq_v has keys that are values": (
        "share_kv_projections share_kv tie_kv kv_tied attention_k_eq_v use_k_eq_v"
    ),
    "attention: a layer shares no keys and values with others; attention=mla keeps few of its own": """
        num_kv_shared_layers cross_layer_attention cross_layer_attention_interval kv_sharing use_cla yoco
        kv_sharing_target_layer_name
    """,
    "attention: attention=sdpa+value_residual": "attn_value_residual value_residual",
    "attention: attention=sdpa+gate": "attn_gate_values attention_gate gate_values",
    "attention: sdpa+relative has a bias by the distance": "rel_pos_bias rel_pos relative_attention t5_bias",
    "attention: index chooses keys, and sparsemax has weights that are 0": "attn_sparse_topk sparse_topk",
    "attention: sdpa takes FlashAttention where it can; python -m model.attention.choose sdpa says where": FLASH,
    "code: a file with a form of your own, in ten lines, as docs/attention.md shows": """
        scale_attn_by_inverse_layer_idx talking_heads attn_talking_heads residual_attn
    """,
    "attention: scores are divided by the root of model.head_size; a modifier of yours may change call.scale": """
        softmax_scale attention_scale attn_scale query_scale scale_attn_weights attention_multiplier
        attention_scores_scalar query_pre_attn_scalar
    """,
    ": scores are float32 in every precision": (
        "attention_softmax_in_fp32 reorder_and_upcast_attn upcast_attention softmax_in_fp32"
    ),
    ": a block is attention, then an MLP; docs/library.md has a model with parts of your own": """
        parallel_residual use_parallel_residual gpt_j_residual macaron moe num_experts n_experts num_local_experts
        parallel_attn shared_attention_norm num_experts_per_tok moe_intermediate_size n_routed_experts n_shared_experts
        n_expert n_expert_per_token router_aux_loss_coef routed_scaling_factor norm_topk_prob n_group topk_group
    """,
    "init_from: docs/library.md saves a model with weights of your own as a checkpoint, which a run may begin with": (
        "init_std initializer_range init_method init_method_std weight_init initialization output_layer_init_method"
    ),
    "init_from: docs/library.md removes heads from a model, as a checkpoint for it": (
        "pruned_heads prune_heads heads_to_prune"
    ),
    "import_from init_from: no code beside weights is ever run": "trust_remote_code",
    # Training
    "optimizer.lr: the peak rate, of Muon; optimizer=adamw takes rates such as 1e-3": "learning_rate lr",
    "optimizer.lr": "matrix_lr",
    "optimizer.embedding_lr": """
        embed_lr embeddings_lr wte_lr embedding_learning_rate embeddings_learning_rate norm_lr bias_lr
    """,
    "optimizer.lm_head_lr": "unembedding_lr head_lr lm_head_learning_rate head_learning_rate",
    "optimizer.lr: of the matrices of all blocks; optimizer.embedding_lr and lm_head_lr are those of the others": """
        param_groups params_groups parameter_groups optim_groups optimizer_groups optimizer_grouped_parameters lr_groups
        layerwise_lr_decay layer_wise_lr_decay layerwise_learning_rate_decay llrd layer_decay layer_lr_decay
        lr_layer_decay layer_lr layer_lrs discriminative_lr differential_lr lr_mult lr_mults lr_multiplier
        lr_multipliers embedding_lr_scale embedding_lr_multiplier
    """,
    "optimizer.beta1: and optimizer.beta2": "betas adam_betas",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer": "optim opt optimizer_type optimizer_name optim_args",
    "optimizer.weight_decay": "wd adam_weight_decay start_weight_decay",
    "schedule.final_factor: the last rate as a share of the peak": """
        min_lr min_learning_rate min_lr_ratio min_lr_rate lr_min lr_min_factor end_lr eta_min final_lr final_lr_frac
        final_lr_fraction learning_rate_decay_frac learning_rate_min_factor cosine_min_lr_ratio
        cosine_learning_rate_final_fraction
    """,
    "schedule: schedule=constant does not decay": "decay_lr",
    "schedule: warmup_stable_decay, cosine or constant": (
        "lr_scheduler lr_scheduler_type lr_scheduler_kwargs lr_schedule lr_decay_style scheduler scheduler_type"
    ),
    "schedule.warmup_steps": "warmup_iters lr_warmup_iters lr_warmup_steps num_warmup_steps warmup_updates",
    "schedule.warmup_steps: a number of steps": "warmup warmup_ratio warmup_fraction warmup_frac lr_warmup_fraction",
    "max_steps: the schedule ends with the run; docs/training.md goes on at its last rate": """
        lr_decay_iters lr_max_steps position_lr_max_steps lr_total_steps lr_steps t_max scheduler_steps
        scheduler_total_steps schedule_steps learning_rate_schedule_steps
    """,
    "schedule.decay_fraction: the share of all steps, at their end, in which the rate falls": """
        decay_steps num_decay_steps lr_decay_steps decay_iters wsd_decay_steps lr_wsd_decay_iters decay_ratio cooldown
        cooldown_steps cooldown_frac cooldown_fraction stable_steps num_stable_steps warmdown_iters warmdown_steps
        warmdown_ratio wsd_decay_ratio
    """,
    "schedule: warmup_stable_decay, of which docs/training.md begins another period by resume=RUN and more steps": """
        num_cycles num_periods period_lengths cycle_length cycle_steps cycle_mult first_cycle_steps lr_restarts restarts
        num_restarts warm_restarts t_0 t_mult
    """,
    "schedule: the rate follows the step alone; patience=3 ends a run": "reduce_lr_on_plateau",
    "max_steps": """
        max_iters num_iterations train_iters train_steps training_steps num_train_steps num_training_steps
        max_train_steps total_steps num_steps n_steps iters n_iters num_iters iterations max_updates exit_interval
        max_steps_per_epoch
    """,
    "max_steps: of the whole run, with those before resume=RUN; init_from=RUN counts from 0": (
        "steps more_steps extra_steps additional_steps further_steps steps_to_train"
    ),
    "max_steps: the line `run` tells the epochs": (
        "epoch epochs num_epochs n_epochs max_epochs min_epochs num_train_epochs single_epoch"
    ),
    "max_steps: dry_run=true max_minutes=30 names the size for a time and a text": (
        "target_param_data_ratio tokens_per_param"
    ),
    "max_new_tokens max_steps: a step has batch_size × model.block_size tokens": (
        "max_tokens tokens n_tokens total_tokens train_tokens"
    ),
    "max_new_tokens tokenizer.vocab_size: of a vocabulary; a run reads max_steps × batch_size × model.block_size": (
        "num_tokens"
    ),
    "max_flops": "target_flops",
    "batch_size: sequences in one step of the optimizer": (
        "global_batch_size total_batch_size train_batch_size batch bs batchsize max_num_seqs"
    ),
    "batch_size: sequences in one step of the optimizer, in all micro-batches and processes": "effective_batch_size",
    "batch_size: a step has batch_size × model.block_size tokens": (
        "tokens_per_batch tokens_per_step total_batch_size_tokens batch_size_in_tokens"
    ),
    "micro_batch_size": "device_batch_size micro_batch mbs",
    "micro_batch_size: batch_size has all sequences of a step": (
        "per_device_train_batch_size train_micro_batch_size_per_gpu"
    ),
    "micro_batch_size: batch_size has all sequences of a step, taken so many at a time": """
        gradient_accumulation_steps gradient_accumulation_iters gradient_accumulation grad_accum grad_accum_steps
        accumulate_grad_batches
    """,
    "micro_batch_size: dry_run=true predicts the memory of one": "auto_find_batch_size auto_scale_batch_size",
    "batch_size: the same in all steps; resume=RUN batch_size=N allow_changes=true changes it": (
        "rampup_batch_size batch_size_schedule batch_size_warmup"
    ),
    "eval_batch_size": "per_device_eval_batch_size eval_accumulation_steps",
    "model.block_size: the same in all steps; init_from=RUN model.block_size=N goes on in longer windows": """
        sequence_length_warmup seq_len_warmup seqlen_warmup sequence_warmup block_size_schedule curriculum
        curriculum_learning use_curriculum
    """,
    "freeze: a list of parts, such as '[token_embedding,blocks.0,blocks.1]'": (
        "freeze_layers num_layers_freeze num_frozen_layers trainable_layers"
    ),
    "freeze: '[blocks.0.mlp,blocks.1.mlp]' leaves the MLPs at zero, where they begin": "attn_only attention_only",
    "freeze: parts that training leaves as they are; there is no LoRA": (
        "lora use_lora lora_rank lora_r lora_alpha lora_dropout peft use_peft qlora"
    ),
    "grad_clip": """
        max_grad_norm max_norm gradient_clip_val gradient_clipping gradient_clip clip_gradient_norm clip_grad
        clip_grad_norm grad_clip_norm grad_norm_clip clip_norm
    """,
    "grad_clip: it clips the norm of the whole gradient": "gradient_clip_algorithm clip_value",
    "grad_clip: a larger gradient is scaled down; a step is skipped if its loss is not finite": (
        "skip_loss_spikes max_loss_to_skip_batch skip_gradient_update_on_clip_norm"
    ),
    "max_skipped_steps: a step whose loss is not finite changes nothing, and so many in a row end the run": (
        "detect_anomaly"
    ),
    "schedule: its rate falls to 0; there is no average in training, docs/library.md has that of checkpoints": (
        "ema ema_decay use_ema model_ema swa use_swa average_checkpoints weight_averaging"
    ),
    "model.dropout: 0.1 or 0.2 where a small text is learned by heart; there is no label smoothing": (
        "label_smoothing label_smoothing_factor label_smoothing_epsilon"
    ),
    ": docs/library.md trains a small model on the logits of a larger one": """
        teacher teacher_model teacher_path teacher_checkpoint teacher_ckpt teacher_model_name_or_path student
        student_model distill distillation do_distill use_distillation knowledge_distillation distillation_loss
        distillation_alpha distill_alpha distillation_temperature distill_temperature kd kd_alpha kd_ratio
        kd_temperature kd_loss_weight
    """,
    ": the loss and the batches are as they are; docs/library.md has a loop of your own": (
        "neftune_noise_alpha callbacks z_loss eod_mask_loss"
    ),
    "optimizer.momentum: Muon's, which is Nesterov's": "muon_momentum nesterov muon_nesterov",
    "optimizer: Muon orthogonalises in four steps of Polar Express, always": (
        "ns_steps ns_coefficients newton_schulz_steps muon_num_ns_steps"
    ),
    "optimizer.lr: that of Muon; docs/training.md says how its steps compare to AdamW's": (
        "adjust_lr_fn match_rms_adamw muon_lr lr_muon"
    ),
    "optimizer.embedding_lr: AdamW's of embeddings, norms and biases; optimizer.lm_head_lr is that of the head": (
        "adamw_lr adam_lr scalar_lr"
    ),
    "optimizer: the epsilon of AdamW is always 1e-10": "eps epsilon adam_eps adam_epsilon",
    "optimizer.lr: the same for every batch_size; docs/sweeps.md computes it from batch_size": """
        scale_lr auto_scale_lr scale_learning_rate lr_scale lr_scale_sqrt lr_base_size lr_base_scale base_batch_size
    """,
    "optimizer.lr: python train.py -m optimizer.lr=0.01,0.02,0.04 compares several": (
        "find_lr lr_find auto_lr_find lr_finder learning_rate_finder lr_range_test"
    ),
    "recompute: recompute=block": """
        gradient_checkpointing use_gradient_checkpointing grad_checkpointing activation_checkpointing
        checkpoint_activations enable_activation_checkpointing enable_activation_offloading recompute_activations
        recompute_granularity gradient_checkpointing_kwargs activation_checkpointing_kwargs
    """,
    "recompute: block recomputes every block; there is no number of them": (
        "recompute_num_layers checkpoint_num_layers checkpoint_every_n_layers activation_checkpoint_every"
    ),
    "patience: the number of evaluations without a better loss": "early_stopping early_stopping_iters patience_epochs",
    "patience": "early_stopping_patience",
    "patience: evaluations without a better loss, by however little; there is no threshold": """
        min_delta early_stopping_threshold early_stopping_delta early_stopping_min_delta patience_delta stop_on_plateau
        early_stop_threshold stop_threshold loss_threshold target_loss stop_loss divergence_threshold
    """,
    "patience: it ends a run by its own losses; docs/sweeps.md trains the best of short runs longer": (
        "pruner pruning early_terminate hyperband asha median_stopping successive_halving"
    ),
    "max_minutes: 60 for an hour of training": """
        max_time max_train_time max_training_time train_time training_time time_limit time time_budget max_duration
        max_runtime max_seconds max_hours max_train_hours exit_duration_in_mins
    """,
    "dry_run: it prints memory and time, and trains nothing; max_steps=1 trains one step": (
        "fast_dev_run debug smoke_test"
    ),
    "dry_run: it prints the parameters of each part, the memory and the time": (
        "summary model_summary print_model show_model torchinfo count_parameters"
    ),
    ": train.py trains, eval.py scores and sample.py writes": (
        "do_train do_eval do_predict do_test eval_only test_only inference_only do_valid"
    ),
    ": OMP_NUM_THREADS=2 before the command sets the threads of each job": "inner_max_num_threads",
    ": python train.py -m hydra/launcher=joblib hydra.launcher.n_jobs=2 trains two jobs at once": (
        "n_jobs num_jobs max_workers max_batch_size launcher"
    ),
    ": python train.py -m hydra/sweeper=decide compares variants; docs/sweeps.md has the sweepers": "sweeper",
    ": python train.py -m hydra/sweeper=optuna searches, with this as hydra.sweeper.NAME; docs/sweeps.md shows it": (
        "n_trials study_name storage direction sampler"
    ),
    ": docs/sweeps.md has the YAML of a sweep by wandb": "method",
    ": a job that fails is told, and the others run; Ctrl-C ends a sweep, which docs/sweeps.md continues": """
        max_failures max_failed_jobs max_failed_trials fail_fast failfast stop_on_error stop_on_failure
        continue_on_error error_score
    """,
    ": docs/scaling.md computes a price and the energy from the time, which dry_run=true predicts": """
        energy track_energy carbontracker codecarbon emissions co2 carbon power cost costs price price_per_hour
        cost_per_hour
    """,
    # The machine
    "precision": "dtype mixed_precision model_dtype train_dtype compute_dtype amp_dtype",
    "dtype: float32, bfloat16 or float16": "precision",
    "precision dtype": "torch_dtype",
    "precision: precision=bf16": "bf16 bfloat16 use_bf16",
    "precision: precision=fp16": "fp16 float16 half use_fp16",
    "precision: precision=fp32": "fp32 float32",
    "precision: the same in training and evaluation": "bf16_full_eval fp16_full_eval",
    "precision: auto takes fewer bits where they are fast": "amp use_amp autocast",
    "precision: fp32, bf16 or fp16, and none with fewer bits": "fp8 fp8_recipe load_in_8bit load_in_4bit",
    "precision: with fp16 the loss is scaled by itself": (
        "loss_scale initial_loss_scale grad_scaler min_loss_scale loss_scale_window"
    ),
    "precision: with fp32 products are exact, with bf16 or fp16 the others are TF32 on a GPU that has it": (
        "tf32 allow_tf32 tensorcores"
    ),
    "compile: auto, on or off": (
        "torch_compile use_compile compile_model torch_compile_backend torch_compile_mode compile_mode"
    ),
    "deterministic": "full_determinism cudnn_deterministic use_deterministic_algorithms",
    "deterministic: true ends a run at what cannot be kept; there is none that warns alone": (
        "warn_only deterministic_warn_only deterministic_debug_mode"
    ),
    "device: auto takes a GPU if there is one": "accelerator device_type device_map cuda use_cuda use_gpu n_gpu_layers",
    "device: cuda:1 is the second GPU; docs/hardware.md chooses several": (
        "gpu gpus gpu_id gpu_ids gpu_index device_id device_ids cuda_device visible_devices cuda_visible_devices"
    ),
    "device: cuda:1 is the second GPU; torchrun --standalone --nproc-per-node=2 train.py takes two": (
        "devices n_gpu n_gpus num_gpus ngpus"
    ),
    "device: device=cpu": "no_cuda use_cpu cpu cpu_only force_cpu",
    "device: a checkpoint has none, and is read wherever it was trained": "map_location",
    "device: on a CPU OMP_NUM_THREADS=2 before the command sets the threads": (
        "threads num_threads n_threads nthreads cpu_threads torch_threads omp_num_threads"
    ),
    ": torchrun --standalone --nproc-per-node=2 train.py takes two GPUs; docs/scaling.md has several machines": (
        "strategy backend ddp ddp_backend local_rank num_nodes nproc_per_node world_size distributed_backend"
    ),
    ": each GPU holds the whole model; docs/hardware.md says how large it may be": """
        fsdp deepspeed zero_stage tensor_parallel_size tensor_model_parallel_size pipeline_model_parallel_size
        use_distributed_optimizer fsdp_config pipe_parallel_size model_parallel_size data_parallel_size
        context_parallel_size sequence_parallel
    """,
    ": leave it out, nothing needs to be set": """
        ddp_find_unused_parameters find_unused_parameters sync_batchnorm benchmark cudnn_benchmark
        synchronize_each_layer enforce_eager fused foreach remove_unused_columns num_sanity_val_steps timing_log_level
        ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph torch_empty_cache_steps skip_memory_metrics
        log_on_each_node save_on_each_node use_liger_kernel bias_gelu_fusion bias_dropout_fusion
    """,
    ": python benchmarks/gpu.py kernels nanoGPT prints what takes the time of a step on a GPU": "profiler profile",
    # Evaluations, logs and checkpoints
    "log_interval: TQDM_DISABLE=1 before the command leaves out its bar, > /dev/null behind it all but the errors": """
        progress progress_bar show_progress enable_progress_bar no_progress disable_progress progress_bar_refresh_rate
        tqdm use_tqdm disable_tqdm quiet silent verbose verbosity verbose_level log_level loglevel logging_level
        log_verbosity
    """,
    "eval_tokens: the targets that an evaluation of a run scores; eval.py scores a whole text": """
        eval_iters eval_batches val_batches val_max_steps eval.max_iters max_eval_samples max_val_samples
        limit_val_batches
    """,
    "data.path: all of it is scored; head -c 1000000 FILE writes a shorter one": "eval_tokens",
    "eval_interval: the first comes after so many steps; eval.py checkpoint=RUN against=BASE has both losses": (
        "eval_at_start eval_on_start eval_first eval_before_training initial_validation eval_delay"
    ),
    "eval_interval": """
        eval_steps eval_every eval_freq eval_frequency eval.interval val_every val_interval val_loss_every
        val_check_interval check_val_every_n_epoch
    """,
    "eval_interval: a number of steps; the last one is always evaluated": "eval_strategy evaluation_strategy",
    "eval_interval: each evaluation writes a sample, of sample_tokens tokens": (
        "sample_every sample_interval sample_freq"
    ),
    "log_interval": """
        logging_steps log_every log_every_n_steps log_freq log_steps print_every print_freq print_interval
        display_interval
    """,
    "log_interval: a number of steps": "logging_strategy",
    "run_dir: its train.log has the log, and its metrics.jsonl the figures, which docs/training.md makes a table": (
        "csv csv_log log_csv csv_logger log_file logfile metrics_file"
    ),
    "log_interval: the first step has a line, and then each of so many": "logging_first_step",
    "log_interval: losses are those of single steps; the run's page draws their smoothed curve beside them": (
        "smoothing smooth_loss loss_smoothing loss_ema running_mean moving_average"
    ),
    "log_interval: metrics.jsonl has the speed so far, and summary.json the memory": (
        "log_throughput log_peak_memory_stats log_memory"
    ),
    "checkpoint_interval": """
        save_steps save_every save_every_n_steps save_freq save_interval checkpoint_every checkpoint_factor ckpt_every
        ckpt_interval save_iters
    """,
    "checkpoint_interval: a number of steps": "save_strategy",
    "checkpoint_interval: a number of steps; dry_run=true prints the seconds of one": (
        "save_every_minutes checkpoint_minutes train_time_interval"
    ),
    "checkpoint_interval: every so many steps; docs/training.md keeps chosen ones": "checkpoint_steps",
    "checkpoint_interval: 1000000 saves no steps but those evaluated and the last": (
        "enable_checkpointing save_checkpoints"
    ),
    "keep_checkpoints": "save_total_limit",
    "keep_checkpoints: of the latest; the best is kept besides": (
        "max_keep_ckpts max_to_keep keep_last keep_last_n keep_last_n_checkpoints max_checkpoints save_top_k"
    ),
    "keep_checkpoints: 1000000 keeps all": "save_all_checkpoints",
    "keep_checkpoints: 1 keeps the best and the latest, to continue from": "save_best_only save_only_best_model",
    "keep_checkpoints: the best is kept besides, and sample.py takes it": "load_best_model_at_end restore_best_weights",
    "keep_checkpoints: the best checkpoint is always kept": "always_save_checkpoint",
    "keep_checkpoints: the last step is always saved": "save_last",
    "keep_checkpoints: the best, which is kept besides, is that with the lowest validation loss": (
        "metric_for_best_model greater_is_better monitor early_stopping_metric early_stopping_monitor early_stop_metric"
    ),
    "keep_checkpoints: docs/sweeps.md removes the state of the optimizers, without which no run continues": (
        "save_only_model save_weights_only no_save_optim"
    ),
    ": weights are always in model.safetensors": "save_safetensors",
    "resume: a run's directory, or auto": (
        "resume_from_checkpoint resume_from resume_path resume_from_step load_checkpoint"
    ),
    "resume: it goes on where the run was in its text": "ignore_data_skip",
    ": python export.py to=FOLDER writes a model that hf upload NAME FOLDER sends, as docs/interop.md shows": (
        "push_to_hub hub_model_id hub_token hub_strategy hub_private_repo"
    ),
    ": python export.py to=FOLDER writes a model that lm_eval measures, as docs/interop.md shows": (
        "tasks eval_tasks num_fewshot gen_kwargs log_samples core_metric_every core_metric_max_per_task"
    ),
    "wandb.mode: online, offline or disabled": (
        "wandb_log wandb_mode use_wandb no_wandb enable_wandb wandb.enabled wandb.disabled wandb.offline log_with"
    ),
    "wandb.mode: online, offline or disabled; docs/training.md hands metrics.jsonl to TensorBoard": (
        "report_to logger logger_name logger_type"
    ),
    "wandb.mode: there is none for TensorBoard; docs/training.md hands it metrics.jsonl": (
        "tensorboard use_tensorboard tensorboard_dir tensorboard_log tensorboard_log_dir"
    ),
    "wandb.project": "wandb_project",
    "wandb.entity": "wandb_entity wandb_team",
    "wandb.group": "wandb_group",
    "wandb.tags: as in '[a,b]'": "wandb_tags",
    "wandb.name": "wandb_run_name run_name",
    "wandb.name: run_dir= names the run's folder": "name run",
    "wandb.notes": "wandb_notes",
    ": WANDB_RUN_ID=ID before the command names a run of wandb, and a resumed run continues its own": (
        "wandb.id wandb.run_id wandb.resume wandb_id wandb_run_id"
    ),
    ": WANDB_DIR=FOLDER before the command names the folder of wandb's files": "wandb.dir wandb_dir",
    ": WANDB_JOB_TYPE=TYPE before the command names it": "wandb.job_type wandb_job_type",
    ": wandb gets the metrics, the samples and the page of a run, no weights and no gradients": (
        "wandb.log_model wandb.watch wandb_log_model wandb_watch log_model"
    ),
    # Places
    "run_dir checkpoint": "out_dir checkpoint_dir ckpt_dir",
    "run_dir to checkpoint": "output_dir",
    "run_dir to: what is there stays; remove it, or name another": "overwrite overwrite_output_dir force",
    "run_dir": "log_dir logdir logging_dir workdir default_root_dir root_dir model_tag experiment_name exp_name",
    "checkpoint init_from: the weights of a run, which train.py continues by resume=RUN": (
        "ckpt ckpt_path checkpoint_path model_path load load_from"
    ),
    "checkpoint": "init_from path m resume run_dir",
    "init_from: the weights of a run, which resume=RUN continues": "checkpoint",
    "init_from: a run begins with the weights of another one, and new optimizers": (
        "finetune finetune_from no_load_optim no_load_rng"
    ),
    "init_from checkpoint: a run; python export.py import_from=NAME to=FOLDER makes one of a model of Hugging Face": (
        "model_name_or_path model_id pretrained pretrained_model initial_checkpoint_dir hf_model model_args"
    ),
    "checkpoint: a run's directory": "model",
    "to results run_dir": "output out",
    "run_dir to results": "outdir save_dir savedir result_dir results_dir results_folder output_folder work_dir",
    "run_dir: each run fills a folder; dry_run=true writes none": "save no_save save_model save_results no_output",
    "results to": "output_file output_path",
    "to results": "out_path save_path export_dir",
    "to: a folder in Hugging Face's format, or FILE.html; docs/interop.md and docs/library.md have others": (
        "format fmt export_format"
    ),
    "to: a folder in Hugging Face's format; docs/interop.md takes it to GGUF and to other programs": "outtype gguf",
    "to: a folder in Hugging Face's format; docs/library.md has the lines for ONNX": "onnx",
    "to: a folder in Hugging Face's format; docs/library.md has the lines that quantise": "quantize quantization",
    ": write settings in FOLDER/experiment/NAME.yaml, and type --config-dir=FOLDER experiment=NAME": A_FILE,
    # Sampling
    "prompt: prompt_file=FILE reads it from a file": "start prefix",
    "prompt data.path": "text",
    "sample_prompt: of the samples in training; sample.py writes others": "prompt",
    "sample_tokens: of the samples in training; sample.py writes others": "max_new_tokens",
    "results: results=- has the text without its prompt, as JSON lines": (
        "include_prefix include_prompt return_full_text echo"
    ),
    "num_samples": "nsamples n_samples num_return_sequences num_samples_per_prompt best_of",
    "num_samples: max_new_tokens is the length of each": "n",
    "prompt tokenizer: <|endoftext|> begins a document, and a sample without a prompt": (
        "unconditional start_token bos bos_token bos_token_id"
    ),
    "max_new_tokens": "length n_predict",
    "max_new_tokens model.block_size": "max_length",
    ": there is no least length, and a sample ends where the model ends the document": (
        "min_length min_tokens min_new_tokens ignore_eos"
    ),
    "top_k": "k",
    "top_p": "nucleus nucleus_p topp",
    "top_p: prompt= is the beginning": "p",
    "results: results=- or a file; without it the text is printed as it comes": "stream",
    "interactive": "i chat",
    "temperature": "temp",
    "temperature: temperature=0 takes the likeliest token": "do_sample greedy",
    "stop": """
        truncate stop_sequences stop_sequence stop_strings stop_string stop_words stop_tokens stop_token_ids
        stopping_strings custom_stopping_strings antiprompt reverse_prompt stop_words_list stopping_criteria
    """,
    r"stop: 'stop=\n' ends a sample with its first line; python sample.py | head -n 3 ends it with its third": (
        "single_line singleline stop_at_newline max_lines num_lines stop_lines max_newlines"
    ),
    "stop: a sample ends before it": "include_stop include_stop_str_in_output",
    "stop: ends before a text; docs/generation.md leaves out a sentence that is cut": "trim_incomplete_sentences",
    "stop tokenizer: a sample ends by itself where the model ends the document, with <|endoftext|>": (
        "eos_token_id eos_token"
    ),
    ": a sample has no special tokens": "skip_special_tokens",
    ": sampling always keeps keys and values of earlier tokens": (
        "use_cache use_kv_cache kv_cache cache_implementation cache_config"
    ),
    ": keys and values are kept in the type in which the model computes": """
        kv_cache_dtype cache_dtype kv_dtype kv_cache_quantization kv_bits cache_type_k cache_type_v type_k type_v
    """,
    ": docs/interop.md has speculative decoding in Python": """
        assistant_model num_assistant_tokens prompt_lookup_num_tokens draft_model speculative_model num_speculations
        speculative_config speculative_tokens
    """,
    ": docs/library.md has a model of the first blocks, and a loss after each for early exit": """
        exit_layer early_exit early_exit_layer early_exit_loss early_exit_loss_scale assistant_early_exit
    """,
    ": a prompt is read in one pass; docs/library.md has a cache, which takes it in pieces": """
        n_batch n_ubatch prefill_chunk_size chunked_prefill enable_chunked_prefill prefill_step_size
    """,
    ": docs/library.md has the lines that keep tokens from being drawn": (
        "logit_bias sequence_bias bad_words bad_words_ids banned_tokens suppress_tokens begin_suppress_tokens"
    ),
    ": there is no beam search, and temperature=0 takes the likeliest token": """
        num_beams n_beams beam_size beam_width beam_search use_beam_search num_beam_groups length_penalty
        diversity_penalty
    """,
    "temperature: then top_k, top_p and min_p, always in this order": "samplers sampler_order temperature_last",
    "min_p: the nearest; it leaves out unlikely tokens, as top_k and top_p do": (
        "typical_p epsilon_cutoff eta_cutoff mirostat mirostat_tau"
    ),
    ": there is no penalty, and a higher temperature with top_p repeats less": """
        repetition_penalty repeat_penalty repeat_last_n frequency_penalty presence_penalty penalty_alpha
        no_repeat_ngram_size dry_multiplier dry_base dry_allowed_length xtc_probability xtc_threshold
    """,
    ": docs/library.md has the lines that guide a text by another prompt": "guidance_scale cfg_scale negative_prompt",
    ": docs/library.md has the lines for the log probabilities of tokens": (
        "logprobs top_logprobs n_probs prompt_logprobs return_logprobs output_scores output_logits"
    ),
    ": docs/library.md has the lines that allow tokens by a pattern": ("grammar guided_regex guided_json json_schema"),
    "batch_size: samples at a time": "gpu_memory_utilization",
}
ALIASES = {theirs: ours for ours, names in NAMES.items() for theirs in names.split()}
"""{their name: its key in NAMES}."""

# The same where a name stands for something else: {a setting that one command alone has, or NAME=VALUES that are typed
# beside: NAMES}. num_samples is of sample.py, stride of eval.py, import_from of export.py.
NAMES_BESIDE = {
    "num_samples": {
        "batch_size: samples at a time": """
            global_batch_size total_batch_size train_batch_size batch bs batchsize max_num_seqs effective_batch_size
            tokens_per_batch tokens_per_step total_batch_size_tokens batch_size_in_tokens rampup_batch_size
            batch_size_schedule batch_size_warmup max_batch_size
        """,
        "batch_size: samples at a time, in one process": PROCESSES,
        "seed: of the first sample; each next one has the next": """
            data_seed shuffle_seed sampler_seed init_seed model_seed weight_seed dropout_seed
        """,
        ": prompts are taken in their order": "shuffle shuffle_data should_shuffle dataset_shuffle",
        "max_new_tokens": "max_tokens tokens n_tokens num_tokens total_tokens",
        "temperature": "t",
        ": sdpa takes FlashAttention where it can; python -m model.attention.choose sdpa says where": FLASH,
        "temperature: and top_k, top_p, min_p": "sampler",
        "results: results=- or a file; without it the text is printed as it comes": "streaming",
        "checkpoint: a run's directory": A_SHAPE,
        ": each setting is typed as NAME=VALUE; no file of them is read": A_FILE,
    },
    "stride": {
        "data.path": """
            validation_file val_file val_data val_data_path val_bin val_data_dir input_val_bin eval_file eval_data
            validation_data valid_file valid_data_path test_path test_file test_data test_dataset test_set test_bin
        """,
        "data.path: all of it is scored; head -c 1000000 FILE writes a shorter one": """
            eval_iters eval_batches val_batches val_max_steps eval.max_iters max_eval_samples max_val_samples
            limit_val_batches
        """,
        "stride: from one scored window to the next": "window_stride train_stride data_stride doc_stride stride_length",
        "stride: model.block_size less the overlap": "overlap window_overlap chunk_overlap",
        "precision": "bf16_full_eval fp16_full_eval",
        ": sdpa takes FlashAttention where it can; python -m model.attention.choose sdpa says where": FLASH,
        "checkpoint: a run's directory": A_SHAPE,
        ": one process scores the text": PROCESSES,
        ": each setting is typed as NAME=VALUE; no file of them is read": A_FILE,
    },
    "import_from": {
        "to": "out_dir",
        "dtype": "mixed_precision model_dtype train_dtype compute_dtype",
        "dtype: dtype=bfloat16": "bf16 bfloat16 use_bf16",
        "dtype: dtype=float16": "fp16 float16 half use_fp16",
        "dtype: dtype=float32": "fp32 float32",
        "checkpoint: a run's directory": A_SHAPE,
        ": each setting is typed as NAME=VALUE; no file of them is read": A_FILE,
    },
    "optimizer=adamw": {"optimizer.lr: the peak rate": "learning_rate lr"},
    "schedule=cosine constant": {
        "schedule: warmup_stable_decay has schedule.decay_fraction, the share of steps in which the rate falls": """
            decay_steps num_decay_steps lr_decay_steps decay_iters wsd_decay_steps lr_wsd_decay_iters decay_ratio
            cooldown cooldown_steps cooldown_frac cooldown_fraction stable_steps num_stable_steps warmdown_iters
            warmdown_steps warmdown_ratio
        """,
    },
    "data=hf": {
        "data.name: or data.path=FILE of Parquet": "dataset train_dataset dataset_path path",
        "data.name: of the data set; wandb.name is that of the run": "name",
        "data.split": "dataset_split train_split",
        ": a data set is read to its end; docs/data.md writes it as JSON lines, of which head writes fewer": """
            max_train_samples max_samples max_examples max_documents num_examples sample_size limit limit_train_batches
            fraction data_fraction train_fraction dataset_fraction max_bytes max_train_tokens
        """,
    },
    "data=tales": {
        "data.tales.count": "max_train_samples max_samples max_examples max_documents num_examples sample_size limit",
    },
    "data=recall copy induction": {"data.task.vocab_size": "vocab_size vocabulary_size n_vocab"},
}
ALIASES_BESIDE = {
    condition: {theirs: ours for ours, names in rows.items() for theirs in names.split()}
    for condition, rows in NAMES_BESIDE.items()
}
"""{condition: {their name: its key in NAMES_BESIDE[condition]}}."""

# {setting or group: {our value or option, and after a colon a word on it: theirs}}.
VALUES = {
    "tokenizer": {
        "byte: one token a byte, so a letter beyond ASCII has several": "char chars character char_level",
        "byte: one token a byte": "bytes",
        "bpe: trained on the text": "sentencepiece spm wordpiece unigram",
        "bpe: words, and pieces of rare ones": "word words wordlevel word_level whitespace",
        "gpt2: the same tokens": "r50k_base",
        "gpt2: OpenAI's": "gpt-2 gpt2-medium gpt2-large gpt2-xl tiktoken",
        "cl100k_base: OpenAI's": "gpt4 gpt-4",
        "o200k_base: OpenAI's": "gpt-4o",
    },
    "data": {
        "shakespeare: with tokenizer=byte a token is a letter": "shakespeare_char",
        "shakespeare: 1.1 MB, downloaded once": "tinyshakespeare tiny_shakespeare",
        "nanogpt: data.path=FOLDER, with the files of its prepare.py": "openwebtext owt",
        "jsonl: data.path=FILE, JSON lines or an array": "json",
        "hf: data.path=FILE": "parquet",
        "text: data.path=FILE": "txt",
        "hf: data.name=HuggingFaceFW/fineweb-edu data.subset=sample-10BT": "fineweb fineweb-edu fineweb_edu",
        "hf: data.name=Salesforce/wikitext data.subset=wikitext-103-raw-v1": "wikitext wikitext103 wikitext-103",
        "hf: data.name=Salesforce/wikitext data.subset=wikitext-2-raw-v1": "wikitext2 wikitext-2",
        "hf: data.name=roneneldan/TinyStories": "tinystories",
        "hf: data.name=allenai/c4 data.subset=en": "c4",
    },
    "model": {
        "gpt2: OpenAI's first size": "gpt gpt2-small gpt2_small gpt2-124m gpt2_124m",
        "gpt2_medium: OpenAI's second size": "gpt2-medium",
        "gpt2_large: OpenAI's third size": "gpt2-large",
        "gpt2_xl: OpenAI's largest size": "gpt2-xl",
        "llama: its shape, with 76M parameters": "llama2 llama3 llama-2 llama-3",
        "tiny: the default": "gpt-nano gpt-micro gpt-mini nano micro mini default",
    },
    "optimizer": {
        "adamw: with optimizer.weight_decay=0 it is Adam": "adam",
        "adamw: the updates of torch's own": "adamw_torch adamw_torch_fused adamw_hf adamw_8bit torch.optim.adamw",
    },
    "schedule": {
        "warmup_stable_decay: schedule.decay_fraction=1 falls from the warm-up on": "linear",
        "warmup_stable_decay: schedule.decay_fraction is the share of the decay": "wsd trapezoidal",
        "warmup_stable_decay: docs/training.md begins another period by resume=RUN and more steps": """
            wsds cosine_with_restarts cosine_restarts cosine_decay_restarts cosine_warm_restarts sgdr
            cosine_annealing_warm_restarts cosine_annealing_with_restarts cosineannealingwarmrestarts
            cosine_with_hard_restarts cosine_hard_restarts cosine_with_warm_restarts cyclic cyclical
        """,
        "constant: it has a warm-up": "constant_with_warmup none",
        "cosine: it has a warm-up": "cosine_with_warmup cosine_annealing cosineannealinglr",
        "cosine: schedule.final_factor is the last rate as a share of the peak": "cosine_with_min_lr",
    },
    "attention": {
        "sdpa: it takes FlashAttention where it can": """
            flash flash_attn flash_attention flash_attention_2 flash2 flash3 fused xformers mem_efficient
        """,
        "sdpa: softmax attention, the default": "full full_attention causal mha multihead softmax standard vanilla",
        "matmul: softmax attention, one step a line": "eager math naive",
        "sdpa: with model.n_kv_head=2, or another divisor of model.n_head": "gqa grouped_query",
        "sdpa: with model.n_kv_head=1": "mqa multi_query",
        "sdpa+window: with model.attention_window=32": "swa local sliding sliding_window sliding_attention",
        "sdpa+diff: one attention minus another": "differential diff_attention",
        "sdpa: with model.position=alibi": "alibi",
        "sdpa: with model.position=rope, the default": "rope rotary",
        "linear: a state in place of keys": "linear_attention",
        "retention: a state that fades at fixed rates": "retnet",
        "delta: the gated delta rule; +conv+gate_silu makes a layer of Gated DeltaNet": """
            deltanet delta_net gated_delta gated_deltanet gdn
        """,
        "delta: a state that fades as learned; there is no Mamba": "mamba mamba2 ssm",
    },
    "model.mlp": {
        "gelu_tanh: GPT-2's": "gelu_new gelu_pytorch_tanh gelu_fast",
        "swiglu: gated by SiLU": "silu swish glu geglu llamamlp",
        "relu2: its square": "relu squared_relu relu_squared",
    },
    "model.norm": {"rmsnorm": "rms_norm rms", "layernorm": "layer_norm ln"},
    "model.position": {
        "rope": "rotary",
        "learned": "absolute learned_absolute",
        "none: the causal mask alone": "nope null false",
    },
    "model.rope_scaling": {"none": "null false", "yarn: the nearest": "dynamic ntk ntk_aware longrope"},
    "precision": {
        "fp16": "16 16-mixed 16-true float16 half",
        "bf16": "bfloat16 bf16-mixed bf16-true",
        "fp32": "32 32-true float32 float full no none",
        "bf16: the products without it are TF32 on a GPU that has it": "tf32",
        "auto: fewer bits where they are fast": "mixed amp",
    },
    "device": {
        "cuda: auto takes it if it is there": "gpu nvidia rocm amd",
        "cuda:0": "0 gpu:0 gpu0 cuda0",
        "cuda:1": "1 gpu:1 gpu1 cuda1",
        "mps": "metal apple",
        "cpu": "-1",
    },
    "compile": {
        "on: it chooses the mode": "1 inductor default reduce-overhead max-autotune",
        "off": "0 none eager",
    },
    "deterministic": {"true: it ends a run at what cannot be kept; there is none that warns alone": "warn warn_only"},
    "recompute": {"block": "true full selective uniform", "none": "false"},
    "wandb.mode": {"online": "true on", "disabled": "false off none", "offline": "dryrun"},
    "checkpoint": {
        "null: the best checkpoint of the newest run": "auto best",
        "null: the best checkpoint of the newest run; RUN/checkpoints/last is the last of a run": "last latest newest",
    },
}
OPTIONS = {
    name: {theirs: ours for ours, values in options.items() for theirs in values.split()}
    for name, options in VALUES.items()
}
"""{setting or group: {their value: its key in VALUES}}."""
