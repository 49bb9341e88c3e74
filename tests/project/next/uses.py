"""What pdconn uses of vLLM's objects.  What it imports, and overrides, is found by itself.

Written down, since these objects are ``Any`` to us.  ``test_next.py`` holds the list against the
source: every name is used there, and every private name, and everything replaced, is listed.
"""

from __future__ import annotations

USES: dict[str, str] = {
    "vllm.config:VllmConfig": "model_config cache_config parallel_config device_config load_config"
    " kv_transfer_config compilation_config attention_config speculative_config aux_output_config"
    " shutdown_timeout num_prefill_lookahead_tokens",
    "vllm.config:KVTransferConfig": "engine_id is_kv_producer is_kv_consumer kv_buffer_device"
    " kv_load_failure_policy kv_connector_extra_config",
    "vllm.config:ParallelConfig": "tensor_parallel_size pipeline_parallel_size data_parallel_index"
    " prefill_context_parallel_size decode_context_parallel_size",
    "vllm.config:CacheConfig": "enable_prefix_caching cache_dtype get_resolved_kv_cache_layout",
    "vllm.config:ModelConfig": "model dtype hf_config hf_text_config use_mla max_model_len"
    " model_arch_config get_total_num_kv_heads get_total_num_hidden_layers enable_sleep_mode"
    " quantization revision seed quantization_config multimodal_config model_weights"
    " trust_remote_code code_revision",
    "vllm.config:CompilationConfig": "static_forward_context",
    "vllm.config:DeviceConfig": "device_type",
    "vllm.config:AttentionConfig": "hisparse_config",
    "vllm.config.aux_output:AuxOutputConfig": "enable_return_routed_experts",
    "vllm.config:SpeculativeConfig": "draft_model_config method kv_cache_dtype"
    " num_speculative_tokens uses_draft_kv_cache use_multi_module_mtp draft_load_config",
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase": "is_draft_layer",
    "vllm.config:LoadConfig": "load_format model_loader_extra_config download_dir",
    "vllm.config.model_arch:ModelArchitectureConfig": "per_layer_overrides total_num_kv_heads"
    " total_num_hidden_layers",
    "vllm.v1.request:Request": "request_id status kv_transfer_params prompt_token_ids prompt_embeds"
    " _all_token_ids all_token_ids num_prompt_tokens num_tokens num_computed_tokens max_tokens"
    " append_output_token_ids num_preemptions"
    " num_in_flight_tokens num_output_tokens lora_request mm_features cache_salt pooling_params"
    " block_hashes skip_reading_prefix_cache abort_immediately resumable shared_prefix_boundary",
    "vllm.lora.request:LoRARequest": "lora_name lora_path adapter_id name",
    "vllm.multimodal.inputs:MultiModalFeatureSpec": "identifier mm_position",
    "vllm.multimodal.inputs:PlaceholderRange": "offset length",
    "vllm.v1.core.block_pool:BlockPool": "blocks touch free_blocks reset_prefix_cache"
    " num_gpu_blocks get_num_free_blocks enable_kv_cache_events hash_block_size cache_full_blocks"
    " null_block free_block_queue cached_block_hash_to_block metrics_collector",
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue": "fake_free_list_head",
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": "block_id block_hash is_null ref_cnt"
    " block_hash_num_tokens next_free_block",
    "vllm.v1.core.kv_cache_manager:KVCacheManager": "coordinator kv_cache_config"
    " get_computed_blocks_for_connector create_kv_cache_blocks prefix_cache_lookup_enabled"
    " get_computed_blocks max_model_len block_pool allocate_slots cache_blocks free get_blocks"
    " new_step_starts reset_prefix_cache take_boundary_state_offloads log_stats",
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": "get_block_ids blocks",
    "vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator": "attention_groups"
    " full_attention_group_id find_longest_cache_hit_per_group",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": "single_type_managers"
    " find_longest_cache_hit",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager": "kv_cache_spec"
    " block_size get_num_skipped_tokens remove_skipped_blocks max_admission_blocks_per_request"
    " req_to_blocks num_cached_block enable_caching cache_hit_alignment_tokens use_eagle"
    " get_num_blocks_to_allocate cache_blocks kv_cache_group_id",
    "vllm.v1.core.kv_cache_coordinator:SpecGroup": "use_eagle",
    "vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager": "get_num_skipped_tokens"
    " remove_skipped_blocks max_admission_blocks_per_request cache_hit_alignment_tokens"
    " enable_caching req_to_blocks num_cached_block block_pool block_size kv_cache_group_id",
    "vllm.v1.core.single_type_kv_cache_manager:ChunkedLocalAttentionManager": ""
    " get_num_skipped_tokens remove_skipped_blocks max_admission_blocks_per_request",
    "vllm.v1.core.sched.scheduler:Scheduler": "schedule update_from_output _update_after_schedule"
    " _request_blocks_can_be_freed _free_request_blocks _free_blocks _preempt_request"
    " _handle_failed_recving _update_waiting_for_remote_kv _drain_deferred_frees requests"
    " reset_prefix_cache sched_step_seq processed_step_seq failed_recving_kv_req_ids",
    "vllm.v1.core.sched.output:SchedulerOutput": "total_num_scheduled_tokens num_scheduled_tokens"
    " kv_connector_block_state make_empty",
    "vllm.v1.core.sched.output:KVConnectorBlockState": "get_block_ids boundary_state_offloads",
    "vllm.v1.kv_cache_interface:KVCacheConfig": "num_blocks kv_cache_tensors kv_cache_groups"
    " transfer_groups transfer_group_ids prefix_cacheable_group_ids select_transfer_block_ids",
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": "layer_names kv_cache_spec",
    "vllm.v1.kv_cache_interface:KVCacheTensor": "layers offset layer_stride block_stride",
    "vllm.v1.kv_cache_interface:FullAttentionSpec": "block_size num_heads state_content_size_bytes",
    "vllm.v1.kv_cache_interface:MLAAttentionSpec": "block_size num_heads"
    " state_content_size_bytes max_tp_shards",
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": "block_size num_heads"
    " state_content_size_bytes sliding_window",
    "vllm.v1.kv_cache_interface:SlidingWindowMLASpec": "block_size num_heads"
    " state_content_size_bytes sliding_window",
    "vllm.v1.kv_cache_interface:ChunkedLocalAttentionSpec": "block_size num_heads"
    " state_content_size_bytes attention_chunk_size",
    "vllm.v1.kv_cache_interface:MambaSpec": "block_size shapes dtypes mamba_type tp_replicated"
    " state_content_size_bytes mamba_cache_mode num_speculative_blocks",
    "vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs": "kv_cache_specs block_size",
    "vllm.v1.outputs:KVConnectorOutput": "finished_recving kv_connector_worker_meta",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorTransferResults": "__init__"
    " finished_recving failed_recving",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": "_kv_cache_config",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorStats": "data",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorPromMetrics": "__init__"
    " _histogram_cls _counter_cls _gauge_cls",
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory": "_registry"
    " register_connector",
    "vllm.distributed.kv_events:BlockStored": "__init__",
    "vllm.distributed.kv_events:BlockRemoved": "__init__",
    "vllm.v1.attention.backend:AttentionBackend": "get_name",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend": "supported_kv_cache_layouts",
    "vllm.v1.engine.core:EngineCore": "collective_rpc set_weight_version",
    "vllm.platforms.cpu:CpuPlatform": "check_and_update_config",
    "vllm.model_executor.models:registry": "_run_in_subprocess",
    "vllm.utils.ompmultiprocessing:OMPProcessManager": "configure_omp_envs skip_setup cpu_lists",
    "vllm.distributed.device_communicators.shm_broadcast:SpinCondition": "wait last_read"
    " busy_loop_s",
    "vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2": "get_kv_cache_spec",
}
"""By ``module:class``, or ``package:module``: its names that ``pdconn.vllm`` uses or replaces."""

REPLACED = (
    "vllm.v1.core.sched.scheduler:Scheduler._handle_failed_recving",
    "vllm.v1.core.block_pool:BlockPool.reset_prefix_cache",
    "vllm.v1.engine.core:EngineCore.collective_rpc",
    "vllm.v1.engine.core:EngineCore.set_weight_version",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.remove_skipped_blocks",
    "vllm.v1.core.single_type_kv_cache_manager:"
    "SingleTypeKVCacheManager.max_admission_blocks_per_request",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend.supported_kv_cache_layouts",
    "vllm.platforms.cpu:CpuPlatform.check_and_update_config",
    "vllm.model_executor.models:registry._run_in_subprocess",
    "vllm.utils.ompmultiprocessing:OMPProcessManager.configure_omp_envs",
    "vllm.distributed.device_communicators.shm_broadcast:SpinCondition.wait",
    "vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2.get_kv_cache_spec",
)
"""What is replaced by ours.  A change of its body is named, for a person to read it."""

FITTING: dict[str, str] = {
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks_for_connector": (
        "a second argument, which ours passes on"
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks": (
        "an optional second argument, which we leave out"
    ),
    "vllm.config:CacheConfig.cache_dtype": "more types, which peers compare by name",
    "vllm.config:SpeculativeConfig.kv_cache_dtype": "more types, which peers compare by name",
    "vllm.config:SpeculativeConfig.method": "other methods, which peers compare by name",
}
"""What differs in the next version and fits all the same, and why; a person has looked."""
