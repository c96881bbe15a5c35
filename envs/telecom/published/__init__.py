"""Published tasks of tau2-bench's telecom desk, played from the user's own copy of their data, which is not shipped.

reading ─► tasks, records, policy ─► PublishedWorld (CompanyTools, PhoneTools) ─► PublishedDesk ─► grading
"""
