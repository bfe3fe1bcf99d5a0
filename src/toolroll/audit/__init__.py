"""`toolroll audit`: are training samples what the model saw and sampled? `audit` checks rows of any
trainer, against the engine's own record (`EngineRecord`), a chat template (`TemplateCheck`), or
both.
"""

from toolroll.audit.audit import audit
from toolroll.audit.record import EngineRecord
from toolroll.audit.report import AuditReport
from toolroll.audit.template import TemplateCheck

__all__ = ["AuditReport", "EngineRecord", "TemplateCheck", "audit"]
