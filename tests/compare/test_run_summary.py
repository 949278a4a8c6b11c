"""What the files of a run tell."""

from typing import Any

from subquad.compare.run_summary import learning_curve
from subquad.tasks import task_class


def test_the_time_of_an_interruption_does_not_count() -> None:
    def record(event: str, update: int, time: float, **values: Any) -> dict[str, Any]:
        return {"event": event, "update": update, "time": time, **values}

    records = [
        record("train", 5, 105.0, loss=3.0),
        record("valid", 10, 110.0, loss=2.0, ppl=7.4),
        record("resumed", 10, 500.0),
        record("train", 15, 506.0, loss=1.5),
        record("valid", 20, 512.0, loss=1.0, ppl="inf"),
    ]
    metric = task_class("language-model").main_metric
    points = learning_curve(records, metric, 30.0)
    assert [(p.update, p.seconds, p.loss, p.value) for p in points] == [(10, 18.0, 2.0, 7.4), (20, 30.0, 1.0, None)]
    assert [p.seconds for p in learning_curve(records, metric, None)] == [None, None]
