"""Bodies as columns: JSON, Avro and Protobuf into one struct of an Arrow type.

    options      which of them, and with which schema
    bodies       what all decoders are: a body becomes a value, or a reason
    ddl          Spark's DDL and Arrow types
    json_schema  a JSON Schema's types
    json         JSON; its types can be found in a sample
    avro         plain datums, through the package fastavro
    protobuf     through the package protobuf

A verdict depends on the body alone, never on those beside it: whoever decodes it again comes to the
same.
"""

from __future__ import annotations

from logquarry.spark.decode.decoder import BodyDecoder
from logquarry.spark.decode.options import DecodeOptions, decoder_for, parse_decode_options

__all__ = ["BodyDecoder", "DecodeOptions", "decoder_for", "parse_decode_options"]
