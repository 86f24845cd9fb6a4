"""Words that are hardly ever the answer when the last word of a passage is asked for."""

WORDS = """
a about above after again against all am an and any are as at be because been before being below between both but by can
could did do does doing don down during each few for from further had has have having he her here hers herself him
himself his how i if in into is it its itself just ll me more most my myself no nor not now o of off on once only or
other our ours ourselves out over own re s same she should so some such t than that the their theirs them themselves
then there these they this those through to too under until up ve very was we were what when where which while who whom
why will with would you your yours yourself yourselves m d y
"""
MARKS = """. , ; : ! ? ' " ` - -- ... ( ) [ ] ’ ‘ “ ” …"""
STOP_WORDS = frozenset(WORDS.split() + MARKS.split())
