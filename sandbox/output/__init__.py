"""How things get in and out: TOML, run folders, PROBLEM.json, figures, HTML pages, sliders.

`config` and `problem_json` read; `run_folder` writes, whole files only; `report` makes pages; `plots`, `theory_plots`
and `interactive` draw.
"""

__all__ = ["config", "interactive", "plots", "problem_json", "report", "run_folder", "theory_plots"]
