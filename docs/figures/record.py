"""Records the timeline that docs/figures/draw.py draws: a low-latency layer on two CPU ranks, of which one is slow.

Of a dozen pairs of steps the quickest is kept, as other programs of the machine show in the others.
"""

from dataclasses import replace
from pathlib import Path

from deep_ep.bench.ranks import run_ranks
from deep_ep.trace.command import Demo, run_demo
from deep_ep.trace.timeline import Timeline

DEMO = Demo(num_steps=13, num_tokens=64, hidden=512, num_experts=8, num_topk=2, is_low_latency=True, slow_rank=1)


def main() -> None:
    """Record and write timeline.json."""
    timeline = Timeline.from_json(run_ranks(2, run_demo, DEMO)[0])
    pairs = [timeline.of_steps([step, step + 1]) for step in range(timeline.num_steps - 1)]
    best = min(pairs, key=lambda pair: max(s.end_us for s in pair.spans) - min(s.start_us for s in pair.spans))
    zero_us, first = min(s.start_us for s in best.spans), min(s.step for s in best.spans)
    spans = tuple(
        replace(
            span,
            step=span.step - first,
            start_us=round(span.start_us - zero_us, 1),
            end_us=round(span.end_us - zero_us, 1),
            waits_us=tuple(round(wait, 1) for wait in span.waits_us),
        )
        for span in best.spans
    )
    (Path(__file__).parent / "timeline.json").write_text(replace(best, spans=spans).to_json() + "\n")


if __name__ == "__main__":
    main()
