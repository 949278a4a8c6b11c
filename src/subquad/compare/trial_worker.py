"""The process that trains or evaluates a trial: `python -m subquad.compare.trial_worker ACTION OUT LABEL NUMBER`.

ACTION is train or evaluate, with a seed as the number, or tune, with the number of a trial of a search. OUT is the
folder of the comparison, whose plan says what the trial is.
"""

import signal
import sys
from pathlib import Path

from subquad.allocator import set_up_command
from subquad.compare.plan import TrialName, read_plan
from subquad.compare.trials import EVALUATION, Trials
from subquad.compare.tuning.trials import train_trial
from subquad.processes import end_with_parent, run_main
from subquad.train.recipe import Recipe
from subquad.train.run import evaluate_to_file, train_run


def main() -> None:
    set_up_command()  # as every command of subquad does: times of another allocator would be others
    end_with_parent()  # a killed comparison, or a lost worker, must not go on training beside the one that takes over
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm's warning, which submitit reads: it ends us if it has to
    action, out, label, number = sys.argv[1:]
    plan, name = read_plan(Path(out)), TrialName(label, int(number))
    if action == "tune":
        train_trial(Path(out), plan, label, int(number))
        return
    trials = Trials(Path(out), plan)
    if action == "train":
        train_run(Recipe.parse(str(name), plan.trial_recipe(name)), trials.folder(name))
        return
    report = evaluate_to_file(trials.run_folder(name), plan.split, trials.folder(name) / EVALUATION)
    if report.lost:
        lost = f"{report.lost:,} of {report.samples:,} samples of {plan.split} were lost"
        raise ValueError(f"{lost}: they have no result")


if __name__ == "__main__":
    sys.exit(run_main(main))
