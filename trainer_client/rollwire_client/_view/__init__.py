"""``rollwire view``: groups as one HTML page that needs no server and no network.

source      the groups of a file, be it a saved buffer or what ``append_groups`` wrote
tokenizer   the text of token ids, from a tokenizer.json
page_data   groups as the page has them: lists of JSON, and columns of tokens
page        the page: its template, style, scripts and data in one text

The scripts, in the order in which the page has them: ``data`` unpacks, ``search`` finds, ``tokens``
draws a sample, ``group`` a group, ``list`` the list of groups, ``header`` what is on top and the
help; ``app`` ties them together.
"""
