// A client of HBase that takes commands from standard input, one a line, and answers each with one line: "ok ..." or
// "error ...". It ends with its standard input. Words are separated by blanks. Run by `java HBaseShell.java`.

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Random;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.hadoop.hbase.Cell;
import org.apache.hadoop.hbase.CellUtil;
import org.apache.hadoop.hbase.HBaseConfiguration;
import org.apache.hadoop.hbase.HRegionLocation;
import org.apache.hadoop.hbase.KeepDeletedCells;
import org.apache.hadoop.hbase.ServerName;
import org.apache.hadoop.hbase.TableName;
import org.apache.hadoop.hbase.client.Admin;
import org.apache.hadoop.hbase.client.ColumnFamilyDescriptorBuilder;
import org.apache.hadoop.hbase.client.Connection;
import org.apache.hadoop.hbase.client.ConnectionFactory;
import org.apache.hadoop.hbase.client.Delete;
import org.apache.hadoop.hbase.client.Durability;
import org.apache.hadoop.hbase.client.Put;
import org.apache.hadoop.hbase.client.RegionLocator;
import org.apache.hadoop.hbase.client.Result;
import org.apache.hadoop.hbase.client.ResultScanner;
import org.apache.hadoop.hbase.client.Row;
import org.apache.hadoop.hbase.client.Scan;
import org.apache.hadoop.hbase.client.Table;
import org.apache.hadoop.hbase.client.TableDescriptorBuilder;
import org.apache.hadoop.hbase.replication.ReplicationPeerConfig;
import org.apache.hadoop.hbase.util.Bytes;

public class HBaseShell {
    private final Connection connection;
    private final Admin admin;
    private final AtomicLong clock = new AtomicLong(1);
    private final AtomicLong written = new AtomicLong();
    private final List<Thread> writers = new ArrayList<>();
    private volatile boolean writing;

    HBaseShell(Connection connection) throws Exception {
        this.connection = connection;
        this.admin = connection.getAdmin();
    }

    public static void main(String[] args) throws Exception {
        PrintStream answers = System.out;
        System.setOut(System.err); // what libraries print is no answer
        HBaseShell shell = new HBaseShell(ConnectionFactory.createConnection(HBaseConfiguration.create()));
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = commands.readLine(); line != null; line = commands.readLine()) {
            String answer;
            try {
                answer = ("ok " + shell.run(line.trim().split(" "))).trim();
            } catch (Throwable problem) {
                problem.printStackTrace();
                answer = "error " + String.valueOf(problem).replace('\n', ' ');
            }
            answers.println(answer);
            answers.flush();
        }
        System.exit(0);
    }

    private String run(String[] words) throws Exception {
        switch (words[0]) {
            case "ready": return ready(Integer.parseInt(words[1]));
            case "create": return create(words);
            case "scope": return scope(words);
            case "put": return put(words);
            case "unlogged": return unlogged(words);
            case "delete": return delete(words);
            case "bulk": return bulk(words);
            case "scan": return scan(words[1], Path.of(words[2]), new Scan().setRaw(true).readAllVersions());
            case "shown": return scan(words[1], Path.of(words[2]), new Scan());
            case "regions": return regions(TableName.valueOf(words[1]));
            case "servers": return String.join(" ", admin.getRegionServers().stream().map(ServerName::getServerName).toList());
            case "move": return move(words);
            case "split": return split(words[1], words[2]);
            case "merge": return merge(words[1], words[2]);
            case "drop": return drop(TableName.valueOf(words[1]));
            case "truncate": return truncate(words[1]);
            case "flush": admin.flush(TableName.valueOf(words[1])); return "";
            case "roll": admin.rollWALWriter(ServerName.valueOf(words[1])); return "";
            case "serial": return serial(words[1], Boolean.parseBoolean(words[2]));
            case "peer": return peer(words);
            case "write": return write(words);
            case "written": return String.valueOf(written.get());
            case "until": return until(Long.parseLong(words[1]));
            case "stop": return stop();
            default: throw new IllegalArgumentException("no command " + words[0]);
        }
    }

    // Returns when the master is initialized and so many region servers are alive.
    private String ready(int servers) throws Exception {
        while (true) {
            try {
                if (admin.getRegionServers().size() == servers) {
                    admin.listNamespaceDescriptors(); // waits until the master is initialized
                    return "";
                }
            } catch (IOException problem) {
                System.err.println("not ready: " + problem); // all of HBase starts
            }
            Thread.sleep(100);
        }
    }

    // create TABLE FAMILY,FAMILY SCOPE REGIONS: the rows of `write` are spread over the regions.
    private String create(String[] words) throws Exception {
        TableDescriptorBuilder table = TableDescriptorBuilder.newBuilder(TableName.valueOf(words[1]));
        for (String family : words[2].split(",")) {
            table.setColumnFamily(ColumnFamilyDescriptorBuilder.newBuilder(Bytes.toBytes(family))
                .setScope(Integer.parseInt(words[3])).setMaxVersions(Integer.MAX_VALUE)
                .setKeepDeletedCells(KeepDeletedCells.TRUE).build());
        }
        int regions = Integer.parseInt(words[4]);
        byte[][] starts = new byte[regions - 1][];
        for (int n = 1; n < regions; n++) {
            starts[n - 1] = Bytes.toBytes(String.format("%04x", 0x10000 * n / regions));
        }
        admin.createTable(table.build(), regions == 1 ? null : starts);
        return "";
    }

    private String scope(String[] words) throws Exception {
        TableName table = TableName.valueOf(words[1]);
        admin.modifyColumnFamily(table, ColumnFamilyDescriptorBuilder
            .newBuilder(admin.getDescriptor(table).getColumnFamily(Bytes.toBytes(words[2])))
            .setScope(Integer.parseInt(words[3])).build());
        return "";
    }

    // put TABLE ROW FAMILY QUALIFIER VALUE [TIMESTAMP]
    private String put(String[] words) throws Exception {
        try (Table table = connection.getTable(TableName.valueOf(words[1]))) {
            table.put(putOf(words));
        }
        return "";
    }

    private String unlogged(String[] words) throws Exception {
        try (Table table = connection.getTable(TableName.valueOf(words[1]))) {
            table.put(putOf(words).setDurability(Durability.SKIP_WAL));
        }
        return "";
    }

    private static Put putOf(String[] words) {
        Put put = new Put(Bytes.toBytesBinary(words[2]));
        long at = words.length > 6 ? Long.parseLong(words[6]) : Long.MAX_VALUE;
        return put.addColumn(Bytes.toBytes(words[3]), Bytes.toBytes(words[4]), at, Bytes.toBytesBinary(words[5]));
    }

    // bulk TABLE FAMILY COUNT: so many rows in one call.
    private String bulk(String[] words) throws Exception {
        List<Row> rows = new ArrayList<>();
        for (int n = 0; n < Integer.parseInt(words[3]); n++) {
            byte[] row = Bytes.toBytes(String.format("bulk-%06d", n));
            rows.add(new Put(row).addColumn(Bytes.toBytes(words[2]), row, row));
        }
        try (Table table = connection.getTable(TableName.valueOf(words[1]))) {
            table.batch(rows, new Object[rows.size()]);
        }
        return "";
    }

    // delete TABLE ROW KIND FAMILY QUALIFIER TIMESTAMP
    private String delete(String[] words) throws Exception {
        try (Table table = connection.getTable(TableName.valueOf(words[1]))) {
            byte[] family = Bytes.toBytes(words[4]), qualifier = Bytes.toBytes(words[5]);
            table.delete(deleteOf(Bytes.toBytesBinary(words[2]), words[3], family, qualifier, Long.parseLong(words[6])));
        }
        return "";
    }

    private static Delete deleteOf(byte[] row, String kind, byte[] family, byte[] qualifier, long at) {
        Delete delete = new Delete(row);
        switch (kind) {
            case "delete": return delete.addColumn(family, qualifier, at);
            case "delete_column": return delete.addColumns(family, qualifier, at);
            case "delete_family": return delete.addFamily(family, at);
            case "delete_family_version": return delete.addFamilyVersion(family, at);
            default: throw new IllegalArgumentException("no kind of delete " + kind);
        }
    }

    // One cell a line: row, family, qualifier and value in hexadecimal, timestamp, type. `scan` has all versions and all
    // deletes, `shown` what a client sees.
    private String scan(String name, Path file, Scan scan) throws Exception {
        connection.clearRegionLocationCache();
        long count = 0;
        try (Table table = connection.getTable(TableName.valueOf(name));
                ResultScanner rows = table.getScanner(scan.setCaching(1000));
                PrintStream out = new PrintStream(Files.newOutputStream(file), false, StandardCharsets.UTF_8)) {
            for (Result row : rows) {
                for (Cell cell : row.rawCells()) {
                    count++;
                    out.println(String.join(" ", hex(CellUtil.cloneRow(cell)), hex(CellUtil.cloneFamily(cell)),
                        hex(CellUtil.cloneQualifier(cell)), hex(CellUtil.cloneValue(cell)),
                        String.valueOf(cell.getTimestamp()), String.valueOf(cell.getType().getCode() & 0xff)));
                }
            }
        }
        return String.valueOf(count);
    }

    private static String hex(byte[] data) {
        return "-" + Bytes.toHex(data);
    }

    // Of each region, in the order of their rows: NAME@SERVER.
    private String regions(TableName table) throws Exception {
        connection.clearRegionLocationCache();
        StringBuilder found = new StringBuilder();
        try (RegionLocator locator = connection.getRegionLocator(table)) {
            for (HRegionLocation place : locator.getAllRegionLocations()) {
                found.append(place.getRegion().getEncodedName()).append('@').append(place.getServerName()).append(' ');
            }
        }
        return found.toString();
    }

    // move REGION [SERVER]
    private String move(String[] words) throws Exception {
        byte[] region = Bytes.toBytes(words[1]);
        if (words.length > 2) {
            admin.move(region, ServerName.valueOf(words[2]));
        } else {
            admin.move(region);
        }
        return "";
    }

    private String split(String region, String row) throws Exception {
        admin.splitRegionAsync(regionName(region), Bytes.toBytesBinary(row)).get(60, TimeUnit.SECONDS);
        return "";
    }

    private String merge(String first, String second) throws Exception {
        byte[][] regions = {Bytes.toBytes(first), Bytes.toBytes(second)};
        admin.mergeRegionsAsync(regions, true).get(60, TimeUnit.SECONDS);
        return "";
    }

    private String drop(TableName table) throws Exception {
        admin.disableTable(table);
        admin.deleteTable(table);
        return "";
    }

    // HBase 2.5 does not have it.
    private String truncate(String region) throws Exception {
        Admin.class.getMethod("truncateRegion", byte[].class).invoke(admin, regionName(region));
        return "";
    }

    private static byte[] regionName(String encoded) {
        return Bytes.toBytes(encoded);
    }

    private String serial(String name, boolean is) throws Exception {
        admin.disableReplicationPeer(name);
        ReplicationPeerConfig was = admin.getReplicationPeerConfig(name);
        admin.updateReplicationPeerConfig(name, ReplicationPeerConfig.newBuilder(was).setSerial(is).build());
        admin.enableReplicationPeer(name);
        return "";
    }

    // peer NAME CLUSTER_KEY: one that is not ours.
    private String peer(String[] words) throws Exception {
        admin.addReplicationPeer(words[1], ReplicationPeerConfig.newBuilder().setClusterKey(words[2]).build(), false);
        return "";
    }

    // ---- a load ----------------------------------------------------------------------------------------------------

    // write SEED THREADS RATE TABLE,TABLE FAMILY: puts, and deletes of every kind, until `stop`. Each row is written by
    // one thread, in the order of its timestamps, which no two changes share. RATE: changes a second, 0: no limit.
    private String write(String[] words) throws Exception {
        writing = true;
        int threads = Integer.parseInt(words[2]);
        double rate = Double.parseDouble(words[3]) / threads;
        for (int n = 0; n < threads; n++) {
            Random chance = new Random(Long.parseLong(words[1]) * 1000 + n);
            int number = n;
            Thread writer = new Thread(() -> writeRows(chance, number, rate, words[4].split(","), Bytes.toBytes(words[5])));
            writer.start();
            writers.add(writer);
        }
        return "";
    }

    private void writeRows(Random chance, int number, double rate, String[] tables, byte[] family) {
        long began = System.nanoTime(), count = 0;
        while (writing) {
            List<Row> rows = new ArrayList<>();
            for (int n = chance.nextInt(40) + 1; n > 0; n--) {
                rows.add(change(chance, number, family));
            }
            try (Table table = connection.getTable(TableName.valueOf(tables[chance.nextInt(tables.length)]))) {
                table.batch(rows, new Object[rows.size()]);
            } catch (Exception problem) {
                // What was not taken is not in the scan either; what was, is.
                problem.printStackTrace();
                connection.clearRegionLocationCache();
            }
            count += rows.size();
            written.addAndGet(rows.size());
            long ahead = rate > 0 ? (long) (count / rate * 1e9) - (System.nanoTime() - began) : 0;
            if (ahead > 0) {
                sleep(ahead);
            }
        }
    }

    private static void sleep(long nanoseconds) {
        try {
            TimeUnit.NANOSECONDS.sleep(nanoseconds);
        } catch (InterruptedException end) {
            Thread.currentThread().interrupt();
        }
    }

    private Row change(Random chance, int number, byte[] family) {
        byte[] row = Bytes.toBytes(String.format("%04x-%d", chance.nextInt(250) * 0x10000 / 250, number));
        byte[] qualifier = Bytes.toBytes("q" + chance.nextInt(3));
        long at = clock.getAndIncrement();
        String[] deletes = {"delete", "delete_column", "delete_family", "delete_family_version"};
        if (chance.nextInt(10) == 0) {
            return deleteOf(row, deletes[chance.nextInt(deletes.length)], family, qualifier, at);
        }
        byte[] value = new byte[chance.nextInt(60)];
        chance.nextBytes(value);
        return new Put(row).addColumn(family, qualifier, at, value);
    }

    // Returns when so many changes were written since the start.
    private String until(long count) {
        while (written.get() < count && writers.stream().anyMatch(Thread::isAlive)) {
            sleep(10_000_000);
        }
        return String.valueOf(written.get());
    }

    private String stop() throws Exception {
        writing = false;
        for (Thread writer : writers) {
            writer.join();
        }
        writers.clear();
        return String.valueOf(written.get());
    }
}
