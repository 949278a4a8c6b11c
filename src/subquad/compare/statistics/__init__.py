"""What scores and times allow to say. Nothing here knows about files, models or pages: arrays go in, intervals come
out.

`critical` has the critical values of simultaneous intervals, `scores` the differences in quality between mechanisms
with what more seeds would show, `times` the ratios of times and when measuring may stop.
"""
