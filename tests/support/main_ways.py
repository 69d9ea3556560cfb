"""What `make test` runs of the integration tests: each feature's main way, against real Kafka and Spark.

By file below ``tests/integration``, the tests that it runs; an empty text means all of the file. All others run with
`make test-all`. A file or test that is named here and does not exist fails.
"""

from __future__ import annotations

from typing import Final

MAIN_WAYS: Final[dict[str, str]] = {
    "audit/test_audit_command.py": "",
    "audit/test_audit_columns.py": (
        "test_the_rows_of_a_parser_are_proven test_a_worker_that_is_killed_is_an_error_by_name"
    ),
    "audit/test_audit_hops.py": "test_one_command_proves_every_hop",
    "audit/test_audit_kafka.py": "test_what_is_whole_is_proven test_damage_is_named_with_its_offsets",
    "audit/test_audit_segments.py": "test_segments_are_what_the_rows_are",
    "audit/test_audit_state_file.py": "test_the_next_audit_reads_what_is_new",
    "audit/test_audit_table.py": "test_a_whole_table_is_proven test_damage_is_named_line_by_line",
    "client/test_fake_gateway.py": "test_both_answer_alike test_a_read_session_alike",
    "client/test_hbase_subscriptions.py": "test_every_kind_of_change_is_in_the_topic_as_hbase_has_it",
    "client/test_library.py": "test_all_of_a_topic_once test_two_readers_of_a_consumer_share",
    "client/test_push.py": "test_files_arrive_byte_for_byte test_logs_of_real_life_arrive_byte_for_byte",
    "client/test_python39.py": "test_it_sends_files_byte_for_byte test_the_library_writes_and_reads",
    "gateway/test_archive_http.py": "test_a_file_is_visible_by_its_commit_at_any_worker test_two_clients_with_one_id",
    "gateway/test_bad_input.py": "test_every_case_gets_its_problem_and_changes_nothing",
    "gateway/test_console.py": "test_each_page_shows_the_stack test_a_token_sees_what_it_may_and_nothing_of_others",
    "gateway/test_console_interface.py": "test_a_preview_sets_nothing test_consumers_are_listed_with_their_lag",
    "gateway/test_gateway_http.py": "",
    "gateway/test_gateway_places.py": "",
    "gateway/test_held_loop.py": "test_the_worst_of_each_format_does_not_hold_the_loop",
    "gateway/test_hanging_transactions.py": "test_what_was_committed_is_not_lost_with_the_next_transaction",
    "gateway/test_metrics_http.py": "test_everything_is_counted_by_bounded_labels",
    "gateway/test_openapi.py": "test_the_document_is_whole test_every_route_is_in_the_document_and_nothing_else_is",
    "gateway/test_quotas_http.py": "test_a_token_over_its_bytes_is_refused_and_what_was_refused_is_not_recorded",
    "gateway/test_reading.py": "",
    "gateway/test_receivers_http.py": "test_lines_by_any_worker test_bulk_by_its_items test_otlp_with_partial_success",
    "gateway/test_security.py": "test_tls_to_and_between_workers test_each_may_do_what_was_granted_and_nothing_else",
    "gateway/test_settings.py": "test_weak_kafka_is_refused_by_name",
    "gateway/test_sources_http.py": "test_the_list_by_prefix_by_silence_and_in_pages",
    "gateway/test_stock_clients.py": "",
    "gateway/test_topic_changes.py": "test_growth_under_load_moves_no_source",
    "gateway/test_transactional_producer.py": "test_a_fence_shuts_the_older_producer_out",
    "loader/test_http_ranges.py": "test_ranges_are_what_the_gateway_reads",
    "loader/test_load_columns.py": "test_wider_types_by_configuration test_a_name_in_the_catalog_follows_the_table",
    "loader/test_load_command.py": "test_two_tables_by_configuration_and_one_of_them_refused",
    "loader/test_load_dropped.py": "",
    "loader/test_load_formats.py": "test_access test_json test_logfmt test_regex",
    "loader/test_load_json.py": "test_keys_without_a_column_are_kept_as_they_are",
    "loader/test_load_many.py": "test_a_table_of_each_topic_and_one_that_fails",
    "loader/test_load_metrics.py": "test_a_load_leaves_a_file_and_the_next_one_continues_it",
    "loader/test_load_moved.py": "test_both_copies_in_one_batch",
    "loader/test_load_segments.py": "test_an_hour_becomes_ready_and_gets_a_new_version",
    "loader/test_load_table.py": "test_committed_lines_are_loaded_once_and_the_next_load_reads_new_ones",
    "loader/test_query_command.py": "test_the_table_and_what_is_behind_it test_it_needs_no_spark_and_about_a_second",
    "loader/test_realtime_view.py": "test_before_the_first_batch_all_is_tail",
    "loader/test_secured_kafka.py": "test_load_view_and_query_with_every_login",
    "loader/test_spark_source_http.py": "test_a_batch_is_what_the_gateway_reads",
    "loader/test_table_move.py": "test_a_table_moves_there_and_back",
    "loader/test_table_reload.py": "test_rows_damaged_by_hand_are_replaced_by_the_records_of_kafka",
    "loader/test_table_requarantine.py": "test_lines_that_the_new_parser_reads_move_into_the_table",
    "loader/test_topic_lag.py": "test_the_lag_is_that_of_the_topic",
    "mirror/test_consumer_offset_sync.py": "",
    "mirror/test_mirror.py": "test_batches_of_every_codec_and_size_and_transactions",
    "mirror/test_moved_readers.py": "test_a_reader_continues_in_the_other_data_centre",
    "ops/test_doctor.py": (
        "test_a_gateway_with_the_documented_rights_is_well test_each_missing_right_is_named_with_its_grant "
        "test_each_setting_of_kafka_that_is_wrong_is_named"
    ),
    "ops/test_keeper.py": "test_a_disk_that_fails_is_left_and_one_that_fills_is_freed",
    "ops/test_read_command.py": "test_the_data_alone_byte_for_byte test_all_that_is_known_of_each_chunk",
    "ops/test_stack.py": "test_the_fixture_answers test_up_prints_one_line_and_stops_on_sigterm",
    "ops/test_status.py": "test_the_whole_of_a_healthy_gateway",
    "ops/test_wheel.py": "test_the_wheel_holds_every_file test_every_command_of_an_extra_has_its_help",
    "read_sessions/test_session_chunks.py": "test_chunks_come_with_all_of_their_keys test_several_topics_by_name",
    "read_sessions/test_session_positions.py": "test_a_session_starts_at_what_was_committed_by_any_node",
    "read_sessions/test_session_sharing.py": "test_partitions_are_shared_and_move",
}
