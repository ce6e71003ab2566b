# SPDX-License-Identifier: Apache-2.0
# Sourced before tests of build-asan and build-tsan: any report ends the process, so that the test sees it.
export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1:abort_on_error=0
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1:exitcode=66
export LSAN_OPTIONS=report_objects=0
# For tools/test and .ci/run, at reduced size: test_scale() is 0.1 under sanitizers, and the cases below are left out, because
# each takes a minute or more there and runs no code that the smaller ones do not. tools/sanitize runs everything.
# The programs of tools/test: what ranks, threads and shared words run through, without tests of time limits.
reduced_programs=(unit_exec unit_comm unit_world unit_transport unit_bootstrap conformance_test moe_conformance_test
  experts_conformance_test api_arguments_test)
reduced_filter='-*HiddenOf7168*:*HiddenOf16383Bytes*:*SixteenRanks*:*FifteenRanks*:*Metadata*'
