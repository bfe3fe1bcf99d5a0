"""What `toolroll.parsers` gives besides its modules; for type checkers only (docs/adr/0005-published-names.md)."""

from toolroll.parsers.openai import OpenAICompatibleToolCallAdapter as OpenAICompatibleToolCallAdapter
from toolroll.parsers.openai import create_openai_adapter as create_openai_adapter
from toolroll.parsers.openai import parse_tools as parse_tools
from toolroll.parsers.registry import get_parser as get_parser
from toolroll.parsers.registry import parser_names as parser_names
