"""Timelines and schedules for people to look at. In reading order:

legend    what each kind of action is called, and its colour
host_lanes  the rows of a drawing: devices, and their copies to the host
text      grids, tables and figures for a terminal
comparison  schedules side by side, ranked
figures   numbers as people read them, and their units
columns   a timeline packed for the page; who waits for whom, as numbers
template  pages from templates
summary   the page's table
page      one interactive HTML file, put together from the files below
pictures  pictures that stand still
curves    curves side by side, on a page without scripts
run_page  the report of a run: curves, figures and tables around its timelines
perfetto  a trace for ui.perfetto.dev

What pages are made of, in `templates/`:

timeline.html   the page: its fixed words and controls, its legend, and places for the parts below
summary.html    its table
report.html     what stands beside timelines: figures, bars, tables, lists
run_front.html  the report of a run before its timelines, and after them: run_back.html
listing.html    a folded table of two columns
curves.html     the page of `curves`

In `styles/`, but for the colours of actions: timeline.css, report.css, curves.css. In `scripts/`:

timeline.data.js     reads the columns, and answers what drawing asks of them
timeline.draw.js     draws the rows: actions, idle time, memory
timeline.overlay.js  draws what follows the pointer, and the time axis
timeline.frames.js   the timelines' elements, and when what of them is painted
timeline.js          what the controls do: zoom, theme, sorting, the details of an action
timeline.save.js     saves what is shown as PNG and SVG
timeline.link.js     keeps what is shown in the page's address
timeline.open.js     opens the page
"""
