"""Timelines and schedules for people to look at. In reading order:

legend    what each kind of action is called, and its colour
text      grids, tables and figures for a terminal
needs     who waits for whom, as numbers
columns   a timeline packed for the page
summary   the page's table
page      one interactive HTML file
svg       a picture that stands still
perfetto  a trace for ui.perfetto.dev
"""
