"""Ablations with statistics, and reports: many runs, what they say together, and how sure that is.

study = read_study(Path("formats.toml"))                 # lowp.lab.study
results = study_results(Path("runs/formats"))            # lowp.lab.results
pandas.DataFrame(results.records())
"""
