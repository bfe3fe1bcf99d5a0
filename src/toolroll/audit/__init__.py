"""`toolroll audit`: are training samples what the model saw and sampled? `audit` checks the rows of
any trainer with the engine's own record (`EngineRecord`), a chat template (`TemplateCheck`), or
both.
"""

from toolroll.audit.record import EngineRecord
from toolroll.audit.report import AuditReport, audit
from toolroll.audit.template import TemplateCheck

__all__ = ["AuditReport", "EngineRecord", "TemplateCheck", "audit"]
