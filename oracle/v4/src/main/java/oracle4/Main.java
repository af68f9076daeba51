package oracle4;

import java.io.File;
import java.io.IOException;
import java.io.PrintWriter;
import java.lang.reflect.Method;
import java.net.ServerSocket;
import java.util.Map;
import java.util.Random;
import java.util.TreeMap;
import java.util.zip.CRC32;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MQVersion;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.common.namesrv.NamesrvConfig;
import org.apache.rocketmq.namesrv.NamesrvController;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.store.config.MessageStoreConfig;

/** A real name server and broker of one version on loopback, with the client of this version. */
public final class Main {
    /** More sends, for versions that know them. */
    interface Sends {
        void send(DefaultMQProducer producer, Random random) throws Exception;

        void close();
    }

    private static final int FILE = 65536;
    private static NamesrvController names;
    private static BrokerController broker;
    private static String address;

    public static void main(String[] args) throws Exception {
        File folder = new File(args[1]);
        start(new File(folder, "store"));
        if (args[0].equals("truth")) {
            pullAll(folder);
        } else {
            generate(folder, args[0].equals("kill"));
        }
        broker.shutdown();
        names.shutdown();
        System.exit(0);
    }

    static byte[] body(Random random, int size) {
        byte[] body = new byte[size];
        for (int i = 0; i < size; i++) {
            body[i] = (byte) (random.nextInt(40) == 0 ? random.nextInt(256) : 'a' + random.nextInt(8));
        }
        return body;
    }

    private static void generate(File folder, boolean kill) throws Exception {
        Random random = new Random(17);
        DefaultMQProducer producer = new DefaultMQProducer("pg_main");
        producer.setNamesrvAddr(address);
        producer.setSendMsgTimeout(10_000);
        producer.start();
        for (int i = 0; i < 160; i++) {
            int size = i % 40 == 0 ? 4200 + random.nextInt(3000) : 1 + random.nextInt(300);
            Message message = new Message(i % 3 == 0 ? "OrderTopic" : "MainTopic", i % 2 == 0 ? "TagA" : "TagB",
                "key" + i + " grp" + i % 7, body(random, size));
            message.setFlag(i % 5);
            if (i % 9 == 0) {
                message.putUserProperty("city", "Zürich-" + i);
            }
            if (i % 23 == 7) {
                message.setDelayTimeLevel(1 + i % 2);
            }
            if (i % 3 == 0) {
                producer.send(message, (queues, same, number) -> queues.get((Integer) number % queues.size()), i % 7);
            } else {
                producer.send(message);
            }
        }
        Sends more = newer();
        if (more != null) {
            more.send(producer, random);
        }
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("cg_main");
        consumer.setNamesrvAddr(address);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setMaxReconsumeTimes(2);
        consumer.subscribe("MainTopic", "TagA");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            String keys = messages.get(0).getKeys();
            if (keys != null && keys.startsWith("key") && Integer.parseInt(keys.split(" ")[0].substring(3)) % 20 == 4) {
                context.setDelayLevelWhenNextConsume(1);
                return ConsumeConcurrentlyStatus.RECONSUME_LATER;
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        Thread.sleep(20_000);
        if (kill) {
            for (int i = 0; i < 25; i++) {
                producer.send(new Message("MainTopic", "TagK", "late" + i, body(random, 100)));
            }
            Runtime.getRuntime().halt(9);
        }
        consumer.shutdown();
        if (more != null) {
            more.close();
        }
        producer.shutdown();
        Thread.sleep(1_500);
    }

    private static Sends newer() throws Exception {
        try {
            return (Sends) Class.forName("oracle4.Newer").getDeclaredConstructor().newInstance();
        } catch (ClassNotFoundException e) {
            return null;
        }
    }

    /** Writes one JSON line for each message that a client can pull from a queue. */
    private static void pullAll(File folder) throws Exception {
        Thread.sleep(3_000);
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("truth");
        consumer.setNamesrvAddr(address);
        consumer.start();
        try (PrintWriter out = new PrintWriter(new File(folder, "pulled.jsonl"), "UTF-8")) {
            for (String topic : broker.getTopicConfigManager().getTopicConfigTable().keySet()) {
                Iterable<MessageQueue> queues;
                try {
                    queues = consumer.fetchSubscribeMessageQueues(topic);
                } catch (MQClientException e) {
                    continue;   // the system topics have no route
                }
                for (MessageQueue queue : queues) {
                    long end = consumer.maxOffset(queue);
                    for (long offset = consumer.minOffset(queue); offset < end;) {
                        PullResult result = consumer.pull(queue, "*", offset, 32);
                        offset = result.getNextBeginOffset();
                        if (result.getPullStatus() == PullStatus.FOUND) {
                            for (MessageExt message : result.getMsgFoundList()) {
                                out.println(line(topic, queue.getQueueId(), message));
                            }
                        }
                    }
                }
            }
        }
        consumer.shutdown();
    }

    private static String line(String topic, int queueId, MessageExt message) {
        CRC32 crc = new CRC32();
        crc.update(message.getBody());
        StringBuilder properties = new StringBuilder();
        for (Map.Entry<String, String> entry : new TreeMap<>(message.getProperties()).entrySet()) {
            // The client adds these two.
            if (!entry.getKey().equals("MIN_OFFSET") && !entry.getKey().equals("MAX_OFFSET")) {
                properties.append(properties.length() == 0 ? "" : ", ").append(quoted(entry.getKey())).append(": ").append(quoted(entry.getValue()));
            }
        }
        return String.format("{\"topic\": %s, \"queueId\": %d, \"queueOffset\": %d, \"physicalOffset\": %d, \"size\": %d, "
                + "\"storeTimestamp\": %d, \"bornTimestamp\": %d, \"flag\": %d, \"sysFlag\": %d, \"reconsumeTimes\": %d, "
                + "\"bodyCRC\": %d, \"properties\": {%s}}", quoted(topic), queueId, message.getQueueOffset(),
            message.getCommitLogOffset(), message.getStoreSize(), message.getStoreTimestamp(), message.getBornTimestamp(),
            message.getFlag(), message.getSysFlag(), message.getReconsumeTimes(), crc.getValue(), properties);
    }

    private static String quoted(String text) {
        StringBuilder out = new StringBuilder("\"");
        for (char c : text.toCharArray()) {
            if (c == '"' || c == '\\') {
                out.append('\\').append(c);
            } else if (c < 32) {
                out.append(String.format("\\u%04x", (int) c));
            } else {
                out.append(c);
            }
        }
        return out.append('"').toString();
    }

    private static void start(File root) throws Exception {
        root.mkdirs();
        System.setProperty("rocketmq.remoting.version", Integer.toString(MQVersion.CURRENT_VERSION));
        int port = freePort();
        address = "127.0.0.1:" + port;
        System.setProperty("rocketmq.namesrv.addr", address);
        NettyServerConfig namesServer = new NettyServerConfig();
        namesServer.setListenPort(port);
        NamesrvConfig namesConfig = new NamesrvConfig();
        namesConfig.setKvConfigPath(new File(root.getParentFile(), "_ns/kv.json").getPath());
        namesConfig.setConfigStorePath(new File(root.getParentFile(), "_ns/ns.properties").getPath());
        names = new NamesrvController(namesConfig, namesServer);
        names.initialize();
        names.start();
        BrokerConfig config = new BrokerConfig();
        config.setNamesrvAddr(address);
        config.setBrokerName("broker-a");
        config.setBrokerIP1("127.0.0.1");
        config.setBrokerIP2("127.0.0.1");
        config.setDefaultTopicQueueNums(4);
        set(config, "setTransactionCheckInterval", long.class, 4_000L);
        set(config, "setTransactionTimeOut", long.class, 2_000L);
        NettyServerConfig server = new NettyServerConfig();
        server.setListenPort(brokerPort());
        MessageStoreConfig store = new MessageStoreConfig();
        store.setStorePathRootDir(root.getPath());
        store.setStorePathCommitLog(new File(root, "commitlog").getPath());
        // Since 4.7 the names have a second p.
        set(store, "setMapedFileSizeCommitLog", int.class, FILE);
        set(store, "setMappedFileSizeCommitLog", int.class, FILE);
        set(store, "setMapedFileSizeConsumeQueue", int.class, 1_000);
        set(store, "setMappedFileSizeConsumeQueue", int.class, 1_000);
        store.setMaxHashSlotNum(500);
        store.setMaxIndexNum(2_000);
        store.setHaListenPort(server.getListenPort() + 1);
        store.setDiskMaxUsedSpaceRatio(95);
        broker = new BrokerController(config, server, new NettyClientConfig(), store);
        if (!broker.initialize()) {
            throw new IllegalStateException("the broker does not start");
        }
        broker.start();
        for (Method method : BrokerController.class.getMethods()) {
            if (method.getName().equals("registerBrokerAll")) {
                method.invoke(broker, method.getParameterCount() == 3 ? new Object[] {true, false, true} : new Object[] {true, false});
            }
        }
    }

    private static void set(Object object, String name, Class<?> type, Object value) throws Exception {
        try {
            object.getClass().getMethod(name, type).invoke(object, value);
        } catch (NoSuchMethodException e) {
            return;   // another version has this setting
        }
    }

    private static int freePort() throws IOException {
        try (ServerSocket socket = new ServerSocket(0)) {
            return socket.getLocalPort();
        }
    }

    /** A port that is free, as are the one above it (HA) and the one two below (VIP channel). */
    private static int brokerPort() throws IOException {
        while (true) {
            int port = freePort();
            try (ServerSocket a = new ServerSocket(port); ServerSocket b = new ServerSocket(port + 1); ServerSocket c = new ServerSocket(port - 2)) {
                return port;
            } catch (IOException e) {
                continue;
            }
        }
    }
}
