import java.io.BufferedReader;
import java.io.File;
import java.io.IOException;
import java.io.InputStreamReader;
import java.net.ServerSocket;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.subscription.SubscriptionGroupConfig;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.store.config.BrokerRole;
import org.apache.rocketmq.store.config.MessageStoreConfig;

/** A real broker for tests of config/: `master DIR` is asked, `slave DIR HOST:PORT` asks once. */
public class ConfigBroker {
    /** A port that is free, as is the one two below it, at which slaves ask for topics. */
    private static int freePort() throws IOException {
        while (true) {
            try (ServerSocket port = new ServerSocket(0); ServerSocket fast = new ServerSocket(port.getLocalPort() - 2)) {
                return port.getLocalPort();
            } catch (IOException e) {
                continue;
            }
        }
    }

    private static BrokerController broker(File dir, boolean slave, int port) throws Exception {
        BrokerConfig config = new BrokerConfig();
        config.setBrokerIP1("127.0.0.1");
        config.setBrokerIP2("127.0.0.1");
        config.setBrokerId(slave ? 1 : 0);
        NettyServerConfig server = new NettyServerConfig();
        server.setListenPort(port);
        MessageStoreConfig store = new MessageStoreConfig();
        store.setStorePathRootDir(dir.getPath());
        store.setStorePathCommitLog(new File(dir, "commitlog").getPath());
        store.setMappedFileSizeCommitLog(1 << 20);
        store.setMappedFileSizeConsumeQueue(20_000);
        store.setMaxHashSlotNum(500);
        store.setMaxIndexNum(2_000);
        store.setHaListenPort(0);
        store.setBrokerRole(slave ? BrokerRole.SLAVE : BrokerRole.ASYNC_MASTER);
        BrokerController broker = new BrokerController(config, server, new NettyClientConfig(), store);
        if (!broker.initialize()) {
            throw new IllegalStateException("the broker did not initialize");
        }
        return broker;
    }

    public static void main(String[] args) throws Exception {
        int port = freePort();
        boolean slave = args[0].equals("slave");
        BrokerController broker = broker(new File(args[1]), slave, port);
        if (slave) {
            // As BrokerController does every 10 s, with the address that a name server told it.
            broker.getBrokerOuterAPI().start();
            broker.getSlaveSynchronize().setMasterAddr(args[2]);
            broker.getSlaveSynchronize().syncAll();
            System.out.println("{\"ready\":true}");
            System.out.flush();
            Runtime.getRuntime().halt(0);
        }
        broker.start();
        System.out.println("{\"ready\":true,\"port\":" + port + "}");
        System.out.flush();
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
        for (String line = in.readLine(); line != null && !line.equals("quit"); line = in.readLine()) {
            String[] words = line.split(" ");
            switch (words[0]) {
                case "topic" -> broker.getTopicConfigManager().updateTopicConfig(new TopicConfig(words[1], 3, 3, 6));
                case "group" -> {
                    SubscriptionGroupConfig group = new SubscriptionGroupConfig();
                    group.setGroupName(words[1]);
                    broker.getSubscriptionGroupManager().updateSubscriptionGroupConfig(group);
                }
                case "offset" -> broker.getConsumerOffsetManager().commitOffset("test", words[1], words[2], 0, Long.parseLong(words[3]));
                default -> {
                    broker.getTopicConfigManager().persist();
                    broker.getSubscriptionGroupManager().persist();
                    broker.getConsumerOffsetManager().persist();
                }
            }
            System.out.println("{\"done\":true}");
            System.out.flush();
        }
        System.out.println("{\"shutdown\":true}");
        System.out.flush();
        Runtime.getRuntime().halt(0);
    }
}
