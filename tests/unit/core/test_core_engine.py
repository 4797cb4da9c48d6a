"""The engine's owner gets an answer to everything, also when the engine dies, and nothing leaks silently."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
import time

import pytest

import baton.engine.core
from baton.engine.core.engine import EngineCore, EngineFailed
from baton.engine.core.messages import ErrorKind, FinishReason
from baton.engine.core.scheduling.scheduler import Scheduler
from baton.engine.core.scheduling.step_builder import StepMismatch
from baton.engine.core.stages import Stage
from baton.engine.core.step import ChunkResult, StepResult

from .core_harness import Harness, config, request
from .core_runner import FakeRunner


class TestAnswers:
    def test_the_first_output_says_how_long_ago_the_request_came_and_first_ran(self) -> None:
        engine = Harness(config())
        began = time.monotonic()
        engine.add(request("a", 6, max_tokens=3))
        engine.run()
        first, *others = engine.answer("a").outputs
        assert 0 <= first.ages[Stage.STARTED] <= first.ages[Stage.QUEUED] <= time.monotonic() - began
        assert first.ages.keys() == {Stage.QUEUED, Stage.STARTED}
        assert all(output.ages is None for output in others)

    def test_logprobs_come_with_their_token(self) -> None:
        engine = Harness(config())
        engine.add(request("a", 6, max_tokens=3, logprobs=0))
        engine.run()
        for output in engine.answer("a").outputs:
            assert output.logprobs is not None
            assert [entry.token_ids[0] for entry in output.logprobs] == output.token_ids

    def test_a_refused_request_is_answered_by_the_next_step(self) -> None:
        engine = Harness(config(max_model_len=20))
        engine.add(request("a", 30), request("b", []))
        assert engine.core.has_work()
        engine.run()
        kinds = [engine.answer(name).last.error.kind for name in "ab"]  # type: ignore[union-attr]
        assert kinds == [ErrorKind.TOO_LONG, ErrorKind.INVALID]
        engine.check_all_given_back()

    def test_an_id_in_use_is_refused_and_its_owner_goes_on(self) -> None:
        engine = Harness(config())
        engine.core.add(request("a", 6, max_tokens=3))
        engine.core.step()
        engine.core.add(request("a", 9, max_tokens=3))
        outputs = engine.core.step()
        assert [output.finish_reason for output in outputs] == [FinishReason.ERROR, None]
        assert outputs[0].error is not None
        assert outputs[0].error.kind is ErrorKind.INVALID
        assert "in use" in outputs[0].error.message

    def test_an_id_may_come_again_once_it_is_over(self) -> None:
        engine = Harness(config())
        engine.add(request("a", 6, max_tokens=1))
        engine.run()
        engine.core.add(request("a", 9, max_tokens=1))
        (output,) = engine.core.step()
        assert output.finish_reason is FinishReason.LENGTH

    def test_a_newer_generation_takes_the_place_of_an_older_one(self) -> None:
        engine = Harness(config())
        engine.add(request("a", 6, max_tokens=9))
        engine.step()
        engine.add(request("a", 6, max_tokens=3, generation=1))
        engine.run_to_the_end()
        assert engine.answer("a", 0).finish_reason is FinishReason.ABORT
        assert engine.answer("a", 1).finish_reason is FinishReason.LENGTH

    def test_aborting_the_unknown_does_nothing(self) -> None:
        engine = Harness(config())
        engine.core.abort("nobody")
        assert not engine.core.has_work()
        engine.step()
        assert not engine.answers

    def test_a_waiting_request_can_be_aborted(self) -> None:
        engine = Harness(config(max_num_seqs=1))
        engine.add(request("a", 6, max_tokens=3), request("b", 6, max_tokens=3), request("c", 6, max_tokens=3))
        engine.step()
        engine.core.abort("b")
        engine.run_to_the_end()
        assert engine.answer("b").finish_reason is FinishReason.ABORT
        assert engine.answer("c").finish_reason is FinishReason.LENGTH

    def test_there_is_no_work_when_only_the_outside_can_help(self) -> None:
        engine = Harness(config(num_blocks=4))
        engine.add(request("a", [1] * 8, keep_kv=True, max_tokens=8))
        engine.run()
        engine.add(request("b", [2] * 12, max_tokens=1))
        engine.run()
        assert engine.core.stats().num_requests_waiting == 1
        assert not engine.core.has_work()
        engine.connector.end_offer(engine.only_offer())
        engine.step()
        assert engine.is_answered("b")

    def test_stats_count_what_happened(self) -> None:
        engine = Harness(config(max_num_seqs=2))
        engine.add(*(request(name, 6, max_tokens=4) for name in "abc"))
        engine.step()
        stats = engine.core.stats()
        assert (stats.num_requests_running, stats.num_requests_waiting) == (2, 1)
        engine.run_to_the_end()
        stats = engine.core.stats()
        assert (stats.prompt_tokens, stats.generation_tokens) == (18, 12)
        assert stats.num_steps == len(engine.runner.plans)


class TestFailure:
    @pytest.mark.parametrize("where", ["fail_at_launch", "fail_at_result"])
    @pytest.mark.parametrize("depth", [1, 2])
    def test_when_the_runner_raises_everyone_is_answered_and_the_owner_learns_why(self, where: str, depth: int) -> None:
        engine = Harness(config(depth=depth, max_num_seqs=1))
        engine.add(request("a", 6, max_tokens=9), request("b", 6, max_tokens=9))
        engine.step(2)
        setattr(engine.runner, where, RuntimeError("device lost"))
        with pytest.raises(EngineFailed, match="device lost") as failure:
            engine.core.step()
        assert isinstance(failure.value.__cause__, RuntimeError)
        outputs = {output.request_id: output for output in failure.value.outputs}
        assert sorted(outputs) == ["a", "b"]
        for output in outputs.values():
            assert output.finish_reason is FinishReason.ERROR
            assert output.error is not None
            assert output.error.kind is ErrorKind.INTERNAL

    def test_a_dead_engine_goes_on_refusing(self) -> None:
        engine = Harness(config())
        engine.runner.fail_at_launch = RuntimeError("device lost")
        engine.core.add(request("a", 6))
        with pytest.raises(EngineFailed):
            engine.core.step()
        assert not engine.core.has_work()
        engine.core.add(request("b", 6))
        assert engine.core.has_work()
        with pytest.raises(EngineFailed) as failure:
            engine.core.step()
        assert [output.request_id for output in failure.value.outputs] == ["b"]

    def test_outputs_from_before_the_failure_are_not_lost(self) -> None:
        engine = Harness(config())
        engine.runner.fail_at_launch = RuntimeError("device lost")
        engine.core.add(request("refused", []))
        engine.core.add(request("a", 6))
        with pytest.raises(EngineFailed) as failure:
            engine.core.step()
        assert [output.request_id for output in failure.value.outputs] == ["refused", "a"]

    def test_answers_of_the_step_in_which_the_connector_fails_are_not_lost(self) -> None:
        class BrokenConnector:
            def __getattr__(self, name: str) -> object:
                if name == "poll":
                    return list
                raise ConnectionError("no such thing as a connector")

        core = EngineCore(Scheduler(config(), BrokenConnector()), FakeRunner(config()))  # type: ignore[arg-type]
        core.add(request("a", 6, max_tokens=1))
        core.add(request("b", 6, keep_kv=True))
        core.add(request("c", 6, max_tokens=9))
        with pytest.raises(EngineFailed) as failure:
            core.step()
        reasons = [(output.request_id, output.finish_reason) for output in failure.value.outputs]
        assert reasons == [("a", FinishReason.LENGTH), ("b", FinishReason.ERROR), ("c", FinishReason.ERROR)]

    def test_a_result_that_belongs_to_no_step_is_refused(self) -> None:
        scheduler = Scheduler(config())
        with pytest.raises(StepMismatch, match="expected none"):
            scheduler.settle(StepResult(0, []))
        scheduler.add(request("a", 6))
        assert scheduler.plan_step() is not None
        with pytest.raises(StepMismatch, match="expected step 0 with 1 chunks"):
            scheduler.settle(StepResult(1, [ChunkResult([1])]))

    def test_a_token_that_was_not_drawn_is_missed(self) -> None:
        scheduler = Scheduler(config())
        scheduler.add(request("a", 6))
        assert scheduler.plan_step() is not None
        with pytest.raises(StepMismatch, match="no token was drawn"):
            scheduler.settle(StepResult(0, [ChunkResult([])]))

    @pytest.mark.parametrize("what", ["block", "row"])
    def test_an_idle_engine_notices_what_was_lost(self, what: str) -> None:
        engine = Harness(config())
        engine.core.add(request("a", 6, max_tokens=1))
        if what == "block":
            engine.scheduler.groups[0].pool.allocate(1)
        else:
            engine.scheduler.rows.take()
        with pytest.raises(EngineFailed, match="no request is left") as failure:
            engine.core.step()
        assert [output.finish_reason for output in failure.value.outputs] == [FinishReason.LENGTH]


def test_the_core_is_plain_python() -> None:
    modules = [module.name for module in pkgutil.walk_packages(baton.engine.core.__path__, "baton.engine.core.")]
    assert len(modules) > 10
    program = (
        "import importlib, sys\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        "print([name for name in ('torch', 'numpy', 'ray', 'transformers', 'nixl') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
