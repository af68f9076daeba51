package clients;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/** Runs mqadmin's commands, one a line of stdin, in one JVM; prints {@code == line} before the output of each. */
public final class Admin {
    public static void main(String[] args) throws Exception {
        System.setErr(System.out);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            System.out.println("== " + line);
            MQAdminStartup.main0(line.split(" "), null);
            System.out.println();
            System.out.flush();
        }
        System.exit(0);
    }
}
