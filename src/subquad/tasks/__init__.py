"""Tasks: one file for each, which knows everything that only this task knows. `task_class("translation")`."""

import importlib
import pkgutil

from subquad.tasks.base import DataConfig, Task, available_tasks, register_task, task_class

# Every file of this folder is imported, so a task registers itself by being there.
for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["DataConfig", "Task", "available_tasks", "register_task", "task_class"]
