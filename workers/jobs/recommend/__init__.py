"""Recommendations: limits for each quota key from a period of the log, as a file of quotas.

``demand`` notes the limits that the asks needed, in a replay in which no quota refuses anything. ``limits``
chooses from them: a default for the many, own limits for the few, and outliers apart. A what-if then counts
the asks that these limits would have refused.
"""
