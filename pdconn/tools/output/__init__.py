"""The result of a command, described once and printed as text or as JSON.

report         the interface of every result: a text and a document
columns        facts of a row: a column of the table, a key of the document, or both
table          lays out columns of plain text
units          counts, sizes and times as text
progress_line  one line of a terminal that shows the current step
"""
