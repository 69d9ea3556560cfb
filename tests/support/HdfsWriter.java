// Keeps a file of HDFS open for writing, as a region server does. It takes commands from standard input, one a line, and
// answers each with "ok" or "error ...". Run by `java HdfsWriter.java URI PATH`.

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;

public class HdfsWriter {
    public static void main(String[] args) throws Exception {
        PrintStream answers = System.out;
        System.setOut(System.err);
        FileSystem files = FileSystem.get(URI.create(args[0]), new Configuration());
        int block = 1 << 20;
        FSDataOutputStream out = files.create(new Path(args[1]), true, 4096, files.getDefaultReplication(), block);
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        answers.println("ok");
        for (String line = commands.readLine(); line != null; line = commands.readLine()) {
            String[] words = line.trim().split(" ");
            try {
                switch (words[0]) {
                    case "write": // COUNT of the byte VALUE
                        byte[] data = new byte[Integer.parseInt(words[1])];
                        java.util.Arrays.fill(data, Byte.parseByte(words[2]));
                        out.write(data);
                        out.hflush();
                        break;
                    case "close":
                        out.close();
                        break;
                    default:
                        throw new IllegalArgumentException(line);
                }
                answers.println("ok");
            } catch (Throwable problem) {
                answers.println("error " + String.valueOf(problem).replace('\n', ' '));
            }
            answers.flush();
        }
        Runtime.getRuntime().halt(0); // what is open stays open
    }
}
