"""Exact coordinates of the fetched jars: one file each, nothing transitive.

So a set is the same on every machine, and its number of files is known in advance. Kafka's lists are the resolved
dependencies of ``org.apache.kafka:kafka_2.13`` and of ``connect-mirror`` with ``connect-runtime``, plus Kafka's tools
and a logging back end.
"""

from __future__ import annotations

from typing import NamedTuple

KAFKA_VERSION = "4.3.1"


class JarSet(NamedTuple):
    """A list of jars, ``organisation:module:revision``, and the name of its folder."""

    name: str
    coordinates: tuple[str, ...]


def _jar_set(name: str, text: str) -> JarSet:
    """``text``: per line an organisation, then its ``module:revision``."""
    lines = [line.split() for line in text.strip().splitlines()]
    return JarSet(name, tuple(f"{organisation}:{jar}" for organisation, *jars in lines for jar in jars))


KAFKA = _jar_set(
    f"kafka-{KAFKA_VERSION}",
    f"""
at.yawk.lz4 lz4-java:1.10.2
com.dynatrace.hash4j hash4j:0.22.0
com.fasterxml.jackson.core jackson-annotations:2.21 jackson-core:2.21.2 jackson-databind:2.21.2
com.fasterxml.jackson.dataformat jackson-dataformat-csv:2.21.2 jackson-dataformat-yaml:2.21.2
com.fasterxml.jackson.datatype jackson-datatype-jdk8:2.21.2
com.github.ben-manes.caffeine caffeine:3.2.0
com.github.luben zstd-jni:1.5.6-10
com.google.re2j re2j:1.8
com.typesafe.scala-logging scala-logging_2.13:3.9.6
com.yammer.metrics metrics-core:2.2.0
commons-beanutils commons-beanutils:1.11.0
commons-collections commons-collections:3.2.2
commons-digester commons-digester:2.1
commons-logging commons-logging:1.3.5
commons-validator commons-validator:1.10.1
net.sf.jopt-simple jopt-simple:5.0.4
net.sourceforge.argparse4j argparse4j:0.7.0
org.apache.kafka kafka-clients:{KAFKA_VERSION} kafka-coordinator-common:{KAFKA_VERSION}
org.apache.kafka kafka-group-coordinator:{KAFKA_VERSION} kafka-group-coordinator-api:{KAFKA_VERSION}
org.apache.kafka kafka-metadata:{KAFKA_VERSION} kafka-raft:{KAFKA_VERSION} kafka-server:{KAFKA_VERSION}
org.apache.kafka kafka-server-common:{KAFKA_VERSION} kafka-share-coordinator:{KAFKA_VERSION}
org.apache.kafka kafka-storage:{KAFKA_VERSION} kafka-storage-api:{KAFKA_VERSION} kafka-tools:{KAFKA_VERSION}
org.apache.kafka kafka-tools-api:{KAFKA_VERSION} kafka-transaction-coordinator:{KAFKA_VERSION}
org.apache.kafka kafka_2.13:{KAFKA_VERSION}
org.apache.logging.log4j log4j-api:2.25.4 log4j-core:2.25.4 log4j-slf4j-impl:2.25.4
org.bitbucket.b_c jose4j:0.9.6
org.hdrhistogram HdrHistogram:2.2.2
org.jspecify jspecify:1.0.0
org.pcollections pcollections:4.0.2
org.scala-lang scala-library:2.13.18 scala-reflect:2.13.18
org.slf4j slf4j-api:1.7.36
org.xerial.snappy snappy-java:1.1.10.7
org.yaml snakeyaml:2.5
""",
)

# Beside KAFKA, for MirrorMaker 2.
MIRROR_MAKER = _jar_set(
    f"mirror-maker-{KAFKA_VERSION}",
    f"""
com.fasterxml.jackson.jakarta.rs jackson-jakarta-rs-base:2.21.2 jackson-jakarta-rs-json-provider:2.21.2
com.fasterxml.jackson.module jackson-module-blackbird:2.21.2 jackson-module-jakarta-xmlbind-annotations:2.21.2
com.sun.activation jakarta.activation:2.0.1
io.github.classgraph classgraph:4.8.179
io.swagger.core.v3 swagger-annotations:2.2.39
jakarta.activation jakarta.activation-api:2.1.0
jakarta.annotation jakarta.annotation-api:2.1.1
jakarta.inject jakarta.inject-api:2.0.1
jakarta.servlet jakarta.servlet-api:6.0.0
jakarta.validation jakarta.validation-api:3.0.2
jakarta.ws.rs jakarta.ws.rs-api:3.1.0
jakarta.xml.bind jakarta.xml.bind-api:3.0.1
javax.activation activation:1.1.1 javax.activation-api:1.2.0
javax.xml.bind jaxb-api:2.3.1
org.apache.kafka connect-api:{KAFKA_VERSION} connect-json:{KAFKA_VERSION} connect-mirror:{KAFKA_VERSION}
org.apache.kafka connect-mirror-client:{KAFKA_VERSION} connect-runtime:{KAFKA_VERSION}
org.apache.kafka connect-transforms:{KAFKA_VERSION}
org.apache.maven maven-artifact:3.9.15
org.codehaus.plexus plexus-utils:3.6.1
org.eclipse.jetty jetty-alpn-client:12.0.34 jetty-client:12.0.34 jetty-http:12.0.34 jetty-io:12.0.34
org.eclipse.jetty jetty-security:12.0.34 jetty-server:12.0.34 jetty-session:12.0.34 jetty-util:12.0.34
org.eclipse.jetty.ee10 jetty-ee10-servlet:12.0.34 jetty-ee10-servlets:12.0.34
org.glassfish.hk2 hk2-api:3.0.6 hk2-locator:3.0.6 hk2-utils:3.0.6 osgi-resource-locator:1.0.3
org.glassfish.hk2.external aopalliance-repackaged:3.0.6
org.glassfish.jersey.containers jersey-container-servlet:3.1.10 jersey-container-servlet-core:3.1.10
org.glassfish.jersey.core jersey-client:3.1.10 jersey-common:3.1.10 jersey-server:3.1.10
org.glassfish.jersey.inject jersey-hk2:3.1.10
org.javassist javassist:3.30.2-GA
""",
)

# For pyspark 4.1.3, which ships the other jars. The token provider of 4.1.3 was never published; that of 4.0.0 differs
# in Kerberos delegation tokens only.
SPARK = _jar_set(
    "spark-4.1.3",
    """
io.delta delta-spark_4.1_2.13:4.4.0 delta-storage:4.4.0
org.apache.commons commons-pool2:2.12.1
org.apache.kafka kafka-clients:3.9.1
org.apache.spark spark-sql-kafka-0-10_2.13:4.1.3 spark-token-provider-kafka-0-10_2.13:4.0.0
""",
)
