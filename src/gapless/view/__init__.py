"""Timelines and schedules for people to look at. In reading order:

legend    what each kind of action is called, and its colour; the page's legend is made in `page`
text      grids, tables and figures for a terminal
figures   numbers as people read them, and their units
needs     who waits for whom, as numbers
columns   a timeline packed for the page
summary   the page's table
cards     what stands beside timelines on a page: figures, bars, tables, lists
page      one interactive HTML file, put together from the files below
svg       a picture that stands still
curves    curves side by side, on a page without scripts
run_page  the report of a run: curves, figures and tables around its timelines
perfetto  a trace for ui.perfetto.dev

curves.css           the style sheet of `curves`
cards.css            that of `cards`

What the page is made of:

timeline.html        its fixed words and controls, with a {{place}} for each part that `page` fills in
timeline.css         its layout and colours, but for those of actions
timeline.data.js     reads the columns, and answers what drawing asks of them
timeline.draw.js     draws the rows: actions, idle time, memory
timeline.overlay.js  draws what follows the pointer, and the time axis
timeline.frames.js   the timelines' elements, and when what of them is painted
timeline.js          what the controls do: zoom, theme, sorting, the details of an action
timeline.save.js     saves what is shown as PNG and SVG
timeline.link.js     keeps what is shown in the page's address
timeline.open.js     opens the page
"""
