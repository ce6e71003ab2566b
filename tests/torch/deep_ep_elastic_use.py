# SPDX-License-Identifier: Apache-2.0
"""Cases of deep_ep_elastic_test.py about how programs call: asynchrony, errors, handles, attributes, and the calls that training and
serving frameworks make."""
import copy
import gc
import threading

import torch
from deep_ep_elastic_support import MIB2, Case, fp8_of, make, output_of, round_up, several_hosts
from deep_ep_support import DEEP_EP, DEVICE, STAND_IN, close, on_streams, raises, reused, same


def asynchronous_calls(buffer):
    first, second = Case(buffer, 60, seed=1), Case(buffer, 30, seed=2)
    results = [case.dispatch(async_with_compute_stream=True, previous_event=buffer.capture(), allocate_on_comm_stream=True)
               for case in (first, second)]
    outs = [buffer.combine(case.outputs(), r[3], topk_weights=r[2], async_with_compute_stream=True, previous_event=r[4],
                           previous_event_before_epilogue=r[4].event) for case, r in zip((first, second), results)]
    for case, result, (out, weights, event) in zip((first, second), results, outs):
        with event(release_handle=True):
            pass
        assert event.event is None
        case.check(result)
        close(out, case.combined(), 0.03)
        same(weights, torch.where(case.idx >= 0, case.weights, 0.0))
    done = first.dispatch()[4]
    assert done.event is None
    raises(RuntimeError, "async_with_compute_stream", done.current_stream_wait)
    called, event = [], first.dispatch(async_with_compute_stream=True)[4]
    event.register_hook_after_wait(lambda: called.append(event.event))
    raises(RuntimeError, "hook_after_wait", lambda: event.register_hook_after_wait(print))
    event.current_stream_wait()
    event.current_stream_wait(release_handle=True)
    assert len(called) == 1 and called[0] is not None and event.event is None
    # A call reads inputs that an asynchronous call writes after that call's event.
    for _ in range(5):
        rows, *_, event = first.dispatch(async_with_compute_stream=True)
        twice = buffer.dispatch(rows[:20], topk_idx=second.idx[:20], num_experts=16, num_max_tokens_per_rank=20, previous_event=event)
        assert twice[3].num_recv_tokens == twice[0].size(0)


def other_ranks_do_not_wait_for_the_event_before_the_epilogue(buffer):
    """Rows arrive and return without it; biases are read after it."""
    from deep_ep.utils import EventHandle
    other = make(buffer.group, num_cpu_timeout_secs=10)  # which ends a call that waits for it
    case = Case(other, 30)
    bias = torch.zeros_like(case.x)

    def gated(call):
        """Makes the call; rank 0's event only finishes when all other ranks have returned."""
        if buffer.rank_idx:
            try:
                return call(None)
            finally:
                buffer.group.barrier().wait()
        event = EventHandle._pending()

        def finish():
            buffer.group.barrier().wait()
            bias.fill_(3).cpu()  # on the device, too, when the event has finished
            event._finish()

        thread = threading.Thread(target=finish, daemon=True)
        thread.start()
        result = call(event)
        thread.join()
        return result

    for align in (None, 1):
        dispatched = gated(lambda event: case.dispatch(previous_event_before_epilogue=event, do_expand=align is not None))
        handle = case.check(dispatched) if align is None else case.check_expanded(dispatched)
        bias.fill_(0 if buffer.rank_idx == 0 else 3)
        out, weights, _ = gated(lambda event: other.combine(
            case.outputs(align), handle, topk_weights=dispatched[2], bias=bias, previous_event_before_epilogue=event))
        close(out, case.combined((torch.full_like(bias, 3), )), 0.03)
        same(weights, torch.where(case.idx >= 0, case.weights, 0.0))
    other.destroy()


def ranks_that_differ_are_told(buffer):
    """All ranks raise the same error, and the next call works."""
    first = buffer.rank_idx == 0
    case = Case(buffer, 12)
    wide = Case(buffer, 12, hidden=32 if first else 64)
    x8, scales = fp8_of(case.x)
    for words, call in (
            ("differ in the columns of x, 32 and 64", wide.dispatch),
            ("differ in the dtype of x, torch.float32 and torch.bfloat16", lambda: case.dispatch(case.x.float() if first else None)),
            ("differ in the columns of topk_idx, 3 and 4", lambda: case.dispatch(
                topk_idx=case.idx[:, :3 if first else 4], topk_weights=None)),
            ("differ in the topk_weights, None and given", lambda: case.dispatch(topk_weights=None if first else case.weights)),
            ("differ in the bytes of scales a row, 8 and 28", lambda: case.dispatch((x8, scales[:, :2 if first else 7]))),
            ("differ in the num_experts, 16 and 32", lambda: case.dispatch(num_experts=16 if first else 32)),
            ("differ in the num_max_tokens_per_rank, 12 and 13", lambda: case.dispatch(num_max_tokens_per_rank=12 + (not first))),
            ("differ in the do_expand, True and False", lambda: case.dispatch(do_expand=first)),
            ("rank 0 brings 12 tokens, and num_max_tokens_per_rank is 11", lambda: case.dispatch(
                *([] if first else [case.x[:5]]), topk_idx=case.idx[:None if first else 5], topk_weights=None,
                num_max_tokens_per_rank=11))):
        for sync in (True, False):
            raises(ValueError, words, lambda: call() if sync else _without_sync(buffer, call))
        case.check_combine(case.check(case.dispatch()))
    raises(ValueError, "ranks 0 and 1 differ in the allow_hybrid_mode, True and False",
           lambda: DEEP_EP().ElasticBuffer(buffer.group, MIB2, allow_hybrid_mode=first))


def _without_sync(buffer, call):
    """Lets the dispatch of a call be one without do_cpu_sync; its event raises the error."""
    usual = buffer.dispatch
    buffer.dispatch = lambda *a, **k: usual(*a, **k, do_cpu_sync=False, async_with_compute_stream=True)
    try:
        call()[-1].current_stream_wait()
    finally:
        del buffer.dispatch


def bad_arguments_are_named(buffer):
    case = Case(buffer, 12)
    n = buffer.num_ranks
    handle, expanded = case.dispatch()[3], case.dispatch(do_expand=True)[3]
    of = lambda *x, **more: lambda: case.dispatch(*x, **more)  # noqa: E731
    again = lambda x=None, with_handle=handle, **more: lambda: buffer.dispatch(  # noqa: E731
        case.x if x is None else x, handle=with_handle, **more)
    rows = case.received()[0]
    ElasticBuffer = DEEP_EP().ElasticBuffer
    for kind, words, call in (
            (TypeError, "x is a list", of([1])),
            (TypeError, "x is torch.int64", of(case.x.long())),
            (TypeError, "x lies on meta", of(case.x.to("meta"))),
            (ValueError, "x[1] is [64]", of((case.x.to(torch.float8_e4m3fn), torch.ones(64)))),
            (ValueError, "topk_idx is None and num_experts 16", of(topk_idx=None)),
            (ValueError, "num_experts None", of(num_experts=None)),
            (ValueError, "num_experts is 15", of(num_experts=15)),
            (ValueError, "topk_idx holds", of(topk_idx=case.idx + 5)),
            (TypeError, "topk_idx is torch.float32", of(topk_idx=case.idx.float())),
            (ValueError, "topk_idx is torch.int64 [11, 4]", of(topk_idx=case.idx[1:])),
            (ValueError, "topk_idx has 0 columns", of(topk_idx=case.idx[:, :0])),
            (ValueError, "topk_weights is torch.float32 [12, 3]", of(topk_weights=torch.ones(12, 3))),
            (ValueError, "num_max_tokens_per_rank is 0", of(num_max_tokens_per_rank=None)),
            (ValueError, "expert_alignment is 0", of(expert_alignment=0)),
            (ValueError, "do_zero_padding is True", of(do_zero_padding=True)),
            (TypeError, "the event to wait for is a int", of(previous_event=1)),
            (TypeError, "the event to wait for is a str", of(previous_event_before_epilogue="later")),
            (ValueError, "recv_stats is torch.int32 [1, ", of(cumulative_local_expert_recv_stats=torch.zeros(1, 16 // n).int())),
            (ValueError, "x has 3 rows", again(case.x[:3])),
            (ValueError, "topk_idx belongs to the dispatch that made", again(topk_idx=case.idx)),
            (ValueError, "recv_stats belongs to the dispatch", again(cumulative_local_expert_recv_stats=torch.zeros(16 // n).int())),
            (ValueError, "do_cpu_sync is True", again(do_cpu_sync=True)),
            (ValueError, "num_experts is 32: the handle's dispatch had 16", again(num_experts=32)),
            (ValueError, "expert_alignment is 8", again(expert_alignment=8)),
            (ValueError, "do_expand is True", again(do_expand=True)),
            (TypeError, "handle is a tuple", again(with_handle=(case.idx, ))),
            (TypeError, "handle is a NoneType", lambda: buffer.combine(rows, None)),
            (ValueError, "give as many", lambda: buffer.combine(torch.zeros(999, 64), handle)),
            (ValueError, "give as many", lambda: buffer.combine(rows[:0], expanded)),
            (ValueError, "bias is torch.bfloat16 [1, 64]", lambda: buffer.combine(rows, handle, bias=case.x[:1])),
            (TypeError, "topk_weights is torch.float64", lambda: buffer.combine(rows, handle, topk_weights=case.received()[2].double())),
            (ValueError, "a row for each of x's", lambda: buffer.combine(
                case.outputs(1), expanded, topk_weights=torch.ones(3))),
            (ValueError, "num_max_tokens_per_rank is 0: give 1 or more, or num_bytes", lambda: ElasticBuffer(buffer.group)),
            (ValueError, "num_bytes is 100", lambda: ElasticBuffer(buffer.group, 100)),
            (ValueError, "num_cpu_bytes is 2097152 and num_bytes is None", lambda: ElasticBuffer(buffer.group, None, MIB2)),
            (ValueError, "num_bytes is 2097152 and num_cpu_bytes 4194304", lambda: ElasticBuffer(buffer.group, MIB2, 2 * MIB2)),
            (ValueError, "num_cpu_timeout_secs is 0", lambda: ElasticBuffer(buffer.group, MIB2, num_cpu_timeout_secs=0))):
        raises(kind, words, call)
    case.check_combine(handle)


def handles_serve_every_buffer_of_the_group(buffer):
    for dropped in (False, True):
        first = make(buffer.group, explicitly_destroy=False)
        case = Case(first, 40)
        plain, expanded = case.check(case.dispatch()), case.check_expanded(case.dispatch(do_expand=True))
        ended = first._comm
        if dropped:
            case.buffer = first = None
            gc.collect()
            assert ended.comm is None
        case.buffer = second = make(buffer.group)
        for _ in range(2):
            case.check_combine(plain)
            case.check_combine(expanded, 1)
            same(second.dispatch(case.x, handle=plain)[0], case.received()[0])
        second.destroy()


def handles_may_be_rebuilt(buffer):
    """From their fields, as by operators that pass tensors on."""
    case = Case(buffer, 20)
    for expand, handle in ((None, case.check(case.dispatch())), (1, case.check_expanded(case.dispatch(do_expand=True)))):
        EPHandle = DEEP_EP().EPHandle
        case.check_combine(EPHandle(**vars(handle)), expand)
        case.check_combine(copy.copy(handle), expand)
        lost = copy.copy(handle)
        lost.dst_buffer_slot_idx = lost.dst_buffer_slot_idx.clone()
        raises(TypeError, "handle", lambda: buffer.combine(case.outputs(expand), lost))


def memory_of_results_is_used_again(buffer):
    if DEVICE != "cpu":
        return  # torch itself keeps CUDA memory
    case = Case(buffer, 300, hidden=2048, seed=3)
    for expand in (False, True):
        reused(lambda: case.dispatch(do_expand=expand))


def training_as_megatron_calls_it(buffer):
    """Megatron-LM's DeepepV2Dispatch and -Combine (pull requests 4632 and 5153): backward is combine and dispatch with the handle."""
    if STAND_IN:
        return
    case = Case(buffer, 30, dtype=torch.float32, holes=False)
    for later in (False, True):
        event = lambda: buffer.capture() if later else None  # noqa: E731
        how = lambda: {"num_sms": 0, "previous_event": event(), "async_with_compute_stream": later,  # noqa: E731
                       "allocate_on_comm_stream": later}
        wait = lambda given: given.current_stream_wait() if later else None  # noqa: E731

        class Dispatch(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, idx, weights):
                rows, local, probs, handle, done = case.dispatch(x, topk_idx=idx, topk_weights=weights, expert_alignment=1, **how())
                wait(done)
                ctx.handle = handle
                return rows, local, probs, torch.tensor(handle.num_recv_tokens_per_expert_list), handle

            @staticmethod
            def backward(ctx, grad, _, grad_probs, *__):
                out, out_probs, done = buffer.combine(grad.contiguous(), handle=ctx.handle, topk_weights=grad_probs.float(), **how())
                wait(done)
                return out, None, out_probs

        class Combine(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, handle):
                ctx.handle = handle
                out, none, done = buffer.combine(x, handle=handle, **how())
                wait(done)
                return out, none

            @staticmethod
            def backward(ctx, grad, _):
                rows, _, _, _, done = buffer.dispatch(grad.contiguous(), handle=ctx.handle, **how())
                wait(done)
                return rows, None

        def layer(rows, idx, probs, first):
            return sum(torch.where(idx[:, j:j + 1] >= 0, output_of(rows, idx[:, j] + first) * probs[:, j:j + 1], 0.0) for j in range(4))

        mine, dense = ([t.clone().requires_grad_() for t in (case.x, case.weights)] for _ in range(2))
        rows, local, probs, counts, handle = Dispatch.apply(mine[0], case.idx, mine[1])
        assert counts.tolist() == case.counts()
        out, _ = Combine.apply(layer(rows, local, probs, case.rank * case.n_local), handle)
        expected = layer(dense[0], case.idx, dense[1], 0)
        close(out, expected, 1e-5)
        for result in (out, expected):
            result.backward(torch.ones_like(result))
        for got, right in zip(mine, dense):
            close(got.grad, right.grad, 1e-5)


def inference_as_servers_call_it(buffer):
    """SGLang's deepep_v2 (pull requests 24443 and 29525) and vLLM's: padded and masked decoding, prefill with counts."""
    ElasticBuffer, case = DEEP_EP().ElasticBuffer, Case(buffer, 20, hidden=512)
    x8, scales = fp8_of(case.x)
    sms = buffer.get_theoretical_num_sms(16, 4)
    qps = buffer.get_theoretical_num_qps(sms)
    (rows, scale), none, weights, handle, event = case.dispatch(
        (x8, scales), expert_alignment=128, num_sms=sms, num_qps=qps, use_tma_aligned_col_major_sf=False, do_cpu_sync=False, do_expand=True)
    assert event.event is None and none is None and rows.size(0) == scale.size(0) == weights.size(0)
    ends = handle.psum_num_recv_tokens_per_expert.tolist()
    begins = [0] + [round_up(end, 128) for end in ends[:-1]]
    assert [end - begin for begin, end in zip(begins, ends)] == case.counts()  # as the masked products read it
    whole = case.outputs(128)
    out, _, event = buffer.combine(torch.cat((whole, whole.new_zeros((rows.size(0) - whole.size(0), 512)))), handle=handle,
                                   topk_weights=None, num_sms=sms, num_qps=qps)
    close(out, case.combined(), 0.03)
    previous = ElasticBuffer.capture()
    rows, idx, weights, handle, event = case.dispatch(
        expert_alignment=128, num_sms=sms, previous_event=previous, async_with_compute_stream=True,
        allocate_on_comm_stream=previous is not None)
    event.current_stream_wait()
    n = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1].item())
    assert n == rows.size(0) and list(handle.num_recv_tokens_per_expert_list) == [round_up(c, 128) for c in case.counts()]


def sizes_domains_and_attributes(buffer):
    deep_ep, n = DEEP_EP(), buffer.num_ranks
    hint = deep_ep.ElasticBuffer.get_buffer_size_hint
    small, large = hint(buffer.group, 64, 4096, num_topk=4), hint(buffer.group, 1024, 4096, num_topk=4)
    assert small % MIB2 == large % MIB2 == 0 and large > small >= n * 64 * 4096 * 2
    assert hint(buffer.group, 1024, 4096, 8, use_fp8_dispatch=True, allow_hybrid_mode=False, allow_multiple_reduction=False) > 0
    hosts = (2, n // 2) if several_hosts() else (1, n)
    assert buffer.get_physical_domain_size() == hosts == deep_ep.get_physical_domain_size(buffer.group)
    assert buffer.get_logical_domain_size() == hosts == deep_ep.get_logical_domain_size(buffer.group)
    assert deep_ep.get_logical_domain_size(buffer.group, allow_hybrid_mode=False) == (1, n)
    for host_of, domains in (([0, 0, 1, 1], (2, 2)), ([0, 0, 1], (3, 1)), ([0, 1, 1], (3, 1)), ([0, 1, 0, 1], (4, 1))):
        assert deep_ep.elastic._physical_domains(host_of) == domains, host_of
    assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == hosts
    assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == divmod(buffer.rank_idx, hosts[1])
    other = deep_ep.ElasticBuffer(buffer.group, num_max_tokens_per_rank=8, hidden=64, num_topk=2, deterministic=True,
                                  allow_hybrid_mode=False, prefer_overlap_with_compute=False, sl_idx=0, num_allocated_qps=7)
    assert other.group is buffer.group and other.num_bytes == hint(buffer.group, 8, 64, 2) and other.num_max_tokens_per_rank == 8
    assert other.get_logical_domain_size() == (1, n) and other.get_physical_domain_size() == hosts
    assert other.num_allocated_qps == other.get_theoretical_num_qps(20) == 7 and not other.explicitly_destroy
    assert other.deterministic and not other.allow_hybrid_mode and other.allow_multiple_reduction
    assert buffer.get_theoretical_num_sms(256, 8) % 2 == 0 and buffer.get_comm_stream() is not None
    case = Case(other, 8)
    case.check_combine(case.check(case.dispatch()))
    other.destroy()
    raises(RuntimeError, "was destroyed", case.dispatch)
    raises(RuntimeError, "was destroyed", other.barrier)
    for name in ("Buffer", "Config", "EventOverlap", "EventHandle", "ElasticBuffer", "EPHandle", "topk_idx_t"):
        assert hasattr(deep_ep, name), name
    from deep_ep.utils import EventHandle
    assert isinstance(buffer.capture(), EventHandle) and deep_ep.EventHandle is EventHandle


def modes_of_the_caller(buffer):
    """Calls work in inference mode and outside it, with the handle of a call in the other mode too."""
    for inside in (True, False):
        for asynchronous in (True, False):
            with torch.inference_mode(inside):
                case = Case(buffer, 8)
                *result, event = case.dispatch(async_with_compute_stream=asynchronous)
                if asynchronous:
                    event.current_stream_wait()
                assert result[0].is_inference() == inside
                handle = case.check((*result, event))
            with torch.inference_mode(not inside):
                case.check_combine(handle)
                out = buffer.combine(case.outputs(), handle, bias=torch.ones_like(case.x))[0]
                if inside:
                    (out.requires_grad_() * 2).sum().backward()


def streams_wait_for_each_other(buffer):
    """A call comes after the caller's work, or only after the event that it is given; the caller's work comes after the call, or after
    its event. Inputs are recorded on the ElasticBuffer's stream, and results, also those in the handle, on the caller's."""
    from deep_ep.utils import EventHandle, EventOverlap
    usual = buffer._stream_for
    streams, recorded = on_streams(buffer)
    own, caller = buffer._stream_for(None).stream, streams.current_stream()
    case = Case(buffer, 8)
    for asynchronous in (False, True):
        for given in (None, EventHandle, lambda s: EventOverlap(EventHandle(s))):
            caller.after, own.after = {"early"}, {"call"}
            event = given(streams) if given is not None else None
            caller.after.add("late")
            epilogue = EventHandle(streams)
            epilogue._event.after = {"epilogue"}
            del recorded[:]
            rows, *_, handle, done = case.dispatch(previous_event=event, async_with_compute_stream=asynchronous,
                                                   previous_event_before_epilogue=epilogue)
            assert {"early", "epilogue"} <= own.after and ("late" in own.after) == (given is None), own.after
            assert (case.x.data_ptr(), own) in recorded and (rows.data_ptr(), caller) in recorded
            assert (handle.recv_src_metadata.data_ptr(), caller) in recorded
            assert ("call" in caller.after) != asynchronous
            if asynchronous:
                done.current_stream_wait()
            assert "call" in caller.after and (done.event is None) != asynchronous
            case.check_combine(handle)
            assert (handle.topk_idx.data_ptr(), own) in recorded
    buffer._stream_for = usual
