"""`toolroll audit`: are training samples what the model saw and sampled? `audit` checks the rows of
any trainer with the engine's own record (`EngineRecord`), a chat template (`TemplateCheck`), or
both.
"""

from toolroll.evaluation.audit.record import EngineRecord
from toolroll.evaluation.audit.report import AuditReport, audit
from toolroll.evaluation.audit.template import TemplateCheck

__all__ = ["AuditReport", "EngineRecord", "TemplateCheck", "audit"]
