package clients;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.QueryResult;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.RPCHook;

/**
 * Real clients against a name server: {@code Main NAMESRV SCENARIO...}. Each scenario uses topics and groups of its own name and
 * prints one line: {@code OK name ms} or {@code FAIL name reason}.
 */
public final class Main {
    interface Scenario {
        void run() throws Exception;
    }

    static final long PATIENCE_S = Long.getLong("patience", 60);
    static String names;
    static String run = Long.toString(System.nanoTime(), 36);
    static RPCHook hook;
    static boolean tls;
    static final List<Runnable> closing = new ArrayList<>();

    public static void main(String[] args) throws Exception {
        System.setProperty("rocketmq.client.rebalance.waitInterval", "1000");
        names = args[0];
        String key = System.getProperty("accessKey");
        if (key != null) {
            hook = new AclClientRPCHook(new SessionCredentials(key, System.getProperty("secretKey")));
        }
        tls = Boolean.getBoolean("useTls");
        Map<String, Scenario> all = new LinkedHashMap<>();
        all.put("send", Main::send);
        all.put("async", Main::async);
        all.put("oneway", Main::oneway);
        all.put("batch", Main::batch);
        all.put("pull", Main::pull);
        all.put("litepull", Main::litePull);
        all.put("push", Main::push);
        all.put("orderly", Main::orderly);
        all.put("tags", Main::tags);
        all.put("sql", Main::sql);
        all.put("delay", Main::delay);
        all.put("retry", Main::retry);
        all.put("broadcast", Main::broadcast);
        all.put("transaction", Main::transaction);
        all.put("check", Main::check);
        all.put("request", Main::request);
        all.put("query", Main::query);
        all.put("compressed", Main::compressed);
        all.put("large", Main::large);
        all.put("refused", Main::refused);
        all.put("produce", Main::produce);
        all.put("consume", Main::consume);
        boolean failed = false;
        List<String> wanted = new ArrayList<>(Arrays.asList(args).subList(1, args.length));
        if (wanted.isEmpty()) {
            wanted.addAll(all.keySet());
            wanted.removeAll(List.of("refused", "produce", "consume"));
        }
        for (String name : wanted) {
            long began = System.currentTimeMillis();
            try {
                all.get(name).run();
                System.out.println("OK " + name + " " + (System.currentTimeMillis() - began));
            } catch (Throwable error) {
                failed = true;
                System.out.println("FAIL " + name + " " + error);
                error.printStackTrace();
            } finally {
                for (Runnable close : closing) {
                    close.run();
                }
                closing.clear();
            }
        }
        System.exit(failed ? 1 : 0);
    }

    // ------------------------------------------------------------------------------------ helpers
    static <T extends ClientConfig> T at(T client, String instance) {
        client.setNamesrvAddr(names);
        client.setInstanceName(instance + run);
        client.setPollNameServerInterval(1000);
        client.setHeartbeatBrokerInterval(1000);
        client.setPersistConsumerOffsetInterval(500);
        client.setUseTLS(tls);
        return client;
    }

    static DefaultMQProducer producer(String name) throws Exception {
        DefaultMQProducer made = at(new DefaultMQProducer("p-" + name + "-" + run, hook), "p" + name);
        made.setSendMsgTimeout((int) PATIENCE_S * 1000);
        made.start();
        closing.add(made::shutdown);
        return made;
    }

    static DefaultMQPushConsumer consumer(String name, String instance) {
        DefaultMQPushConsumer made = at(
            new DefaultMQPushConsumer(null, "c-" + name + "-" + run, hook, new org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely()),
            instance + name);
        made.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        closing.add(made::shutdown);
        return made;
    }

    static String topic(String name) {
        return "t-" + name + "-" + run;
    }

    static Message message(String topic, String tag, String key, String body) {
        return new Message(topic, tag, key, body.getBytes(StandardCharsets.UTF_8));
    }

    static String body(Message message) {
        return new String(message.getBody(), StandardCharsets.UTF_8);
    }

    static void expect(Object expected, Object found) {
        if (!expected.equals(found)) {
            throw new AssertionError("expected " + expected + ", found " + found);
        }
    }

    static void await(String what, java.util.concurrent.Callable<Boolean> condition) throws Exception {
        long end = System.currentTimeMillis() + PATIENCE_S * 1000;
        while (!condition.call()) {
            if (System.currentTimeMillis() > end) {
                throw new AssertionError("not in time: " + what);
            }
            Thread.sleep(20);
        }
    }

    static Set<String> bodies(int count) {
        Set<String> found = new TreeSet<>();
        for (int i = 0; i < count; i++) {
            found.add("body " + i);
        }
        return found;
    }

    static Set<String> collect(DefaultMQPushConsumer consumer, Set<String> into) throws Exception {
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt one : messages) {
                into.add(body(one));
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        return into;
    }

    static void fill(DefaultMQProducer producer, String topic, int count) throws Exception {
        for (int i = 0; i < count; i++) {
            expect(SendStatus.SEND_OK, producer.send(message(topic, "a", "k" + i, "body " + i)).getSendStatus());
        }
    }

    // -------------------------------------------------------------------------------------- sends
    static void send() throws Exception {
        DefaultMQProducer producer = producer("send");
        Set<Integer> queues = new TreeSet<>();
        for (int i = 0; i < 20; i++) {
            SendResult result = producer.send(message(topic("send"), "a", "k" + i, "body " + i));
            expect(SendStatus.SEND_OK, result.getSendStatus());
            expect(32, result.getOffsetMsgId().length());
            queues.add(result.getMessageQueue().getQueueId());
        }
        expect(4, queues.size());
    }

    static void async() throws Exception {
        DefaultMQProducer producer = producer("async");
        CountDownLatch done = new CountDownLatch(200);
        AtomicReference<Throwable> failure = new AtomicReference<>();
        for (int i = 0; i < 200; i++) {
            producer.send(message(topic("async"), "a", "k" + i, "body " + i), new SendCallback() {
                public void onSuccess(SendResult result) {
                    done.countDown();
                }

                public void onException(Throwable error) {
                    failure.set(error);
                    done.countDown();
                }
            });
        }
        expect(true, done.await(PATIENCE_S, TimeUnit.SECONDS));
        if (failure.get() != null) {
            throw new AssertionError(failure.get());
        }
    }

    static void oneway() throws Exception {
        DefaultMQProducer producer = producer("oneway");
        for (int i = 0; i < 30; i++) {
            producer.sendOneway(message(topic("oneway"), "a", "k" + i, "body " + i));
        }
        Set<String> found = collect(subscribed("oneway", "*"), ConcurrentHashMap.newKeySet());
        await("one-way messages", () -> found.equals(bodies(30)));
    }

    static DefaultMQPushConsumer subscribed(String name, String tags) throws Exception {
        DefaultMQPushConsumer consumer = consumer(name, "c");
        consumer.subscribe(topic(name), tags);
        return consumer;
    }

    static void batch() throws Exception {
        DefaultMQProducer producer = producer("batch");
        List<Message> messages = new ArrayList<>();
        for (int i = 0; i < 50; i++) {
            messages.add(message(topic("batch"), "a", "k" + i, "body " + i));
        }
        SendResult result = producer.send(messages);
        expect(SendStatus.SEND_OK, result.getSendStatus());
        expect(50, result.getMsgId().split(",").length);
        Set<String> found = collect(subscribed("batch", "*"), ConcurrentHashMap.newKeySet());
        await("the batch", () -> found.equals(bodies(50)));
    }

    static void compressed() throws Exception {
        DefaultMQProducer producer = producer("compressed");
        String text = "x".repeat(100_000);
        expect(SendStatus.SEND_OK, producer.send(message(topic("compressed"), "a", "k", text)).getSendStatus());
        Set<String> found = collect(subscribed("compressed", "*"), ConcurrentHashMap.newKeySet());
        await("the compressed message", () -> found.equals(Set.of(text)));
    }

    static void large() throws Exception {
        DefaultMQProducer producer = producer("large");
        producer.setMaxMessageSize(8 << 20);
        producer.setCompressMsgBodyOverHowmuch(64 << 20);
        byte[] body = new byte[3 << 20];
        new java.util.Random(1).nextBytes(body);
        expect(SendStatus.SEND_OK, producer.send(new Message(topic("large"), body)).getSendStatus());
        try {
            producer.send(new Message(topic("large"), new byte[5 << 20]));
            throw new AssertionError("5 MiB were accepted");
        } catch (org.apache.rocketmq.client.exception.MQBrokerException error) {
            expect(13, error.getResponseCode());
        }
    }

    static void refused() throws Exception {
        DefaultMQProducer producer = producer("refused");
        try {
            producer.send(message(System.getProperty("topic"), "a", "k", "x"));
        } catch (Exception error) {
            System.out.println("REFUSED " + error.getMessage().replace('\n', ' '));
            return;
        }
        throw new AssertionError("the send was accepted");
    }

    /** Sends until it is killed, and prints the body of each acknowledged message. */
    static void produce() throws Exception {
        DefaultMQProducer producer = producer("produce");
        String topic = System.getProperty("topic");
        int count = Integer.getInteger("count", Integer.MAX_VALUE);
        for (int i = 0; i < count; i++) {
            String body = System.getProperty("prefix", "") + i;
            SendResult result = producer.send(message(topic, "a", body, body));
            expect(SendStatus.SEND_OK, result.getSendStatus());
            System.out.println("SENT " + body);
        }
    }

    /** Consumes count messages of a topic for a group, and prints their bodies. */
    static void consume() throws Exception {
        DefaultMQPushConsumer consumer = at(new DefaultMQPushConsumer(System.getProperty("group")), "consume");
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(System.getProperty("topic"), System.getProperty("tags", "*"));
        int count = Integer.getInteger("count");
        Set<String> found = collect(consumer, ConcurrentHashMap.newKeySet());
        closing.add(consumer::shutdown);
        await(count + " messages", () -> found.size() >= count);
        Thread.sleep(1500);
        for (String body : new TreeSet<>(found)) {
            System.out.println("GOT " + body);
        }
    }

    // -------------------------------------------------------------------------------------- pulls
    static void pull() throws Exception {
        fill(producer("pull"), topic("pull"), 40);
        DefaultMQPullConsumer consumer = at(new DefaultMQPullConsumer("c-pull-" + run, hook), "cpull");
        consumer.start();
        closing.add(consumer::shutdown);
        Set<String> found = new TreeSet<>();
        // A queue gets its messages a little after the send.
        await("40 messages in the queues", () -> {
            long sum = 0;
            for (MessageQueue queue : consumer.fetchSubscribeMessageQueues(topic("pull"))) {
                sum += consumer.maxOffset(queue);
            }
            return sum == 40;
        });
        for (MessageQueue queue : consumer.fetchSubscribeMessageQueues(topic("pull"))) {
            expect(0L, consumer.minOffset(queue));
            long end = consumer.maxOffset(queue);
            expect(0L, consumer.searchOffset(queue, 0));
            long offset = 0;
            while (true) {
                PullResult result = consumer.pull(queue, "*", offset, 4);
                offset = result.getNextBeginOffset();
                if (result.getPullStatus() != PullStatus.FOUND) {
                    expect(PullStatus.NO_NEW_MSG, result.getPullStatus());
                    break;
                }
                for (MessageExt one : result.getMsgFoundList()) {
                    found.add(body(one));
                    expect(queue.getQueueId(), one.getQueueId());
                    expect("a", one.getTags());
                }
            }
            consumer.updateConsumeOffset(queue, offset);
            consumer.getOffsetStore().persist(queue);
            // The client saves the offset one-way: 5.x may send the next request first.
            await("offset " + end, () -> consumer.fetchConsumeOffset(queue, true) == end);
            expect(end, offset);
            expect(PullStatus.OFFSET_ILLEGAL, consumer.pull(queue, "*", 99, 4).getPullStatus());
            expect(PullStatus.NO_MATCHED_MSG, consumer.pull(queue, "nothing", 0, 4).getPullStatus());
        }
        expect(bodies(40), found);
    }

    static void litePull() throws Exception {
        fill(producer("litepull"), topic("litepull"), 40);
        DefaultLitePullConsumer consumer = at(new DefaultLitePullConsumer(null, "c-litepull-" + run, hook), "clite");
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic("litepull"), "*");
        consumer.start();
        closing.add(consumer::shutdown);
        Set<String> found = new TreeSet<>();
        await("lite pull", () -> {
            for (MessageExt one : consumer.poll(500)) {
                found.add(body(one));
            }
            return found.equals(bodies(40));
        });
        consumer.commitSync();
    }

    // ------------------------------------------------------------------------------------- pushes
    static void push() throws Exception {
        DefaultMQProducer producer = producer("push");
        fill(producer, topic("push"), 10);
        Set<String> found = collect(subscribed("push", "*"), ConcurrentHashMap.newKeySet());
        await("messages from before", () -> found.equals(bodies(10)));
        long slowest = 0;
        for (int i = 10; i < 40; i++) {
            String body = "body " + i;
            long began = System.nanoTime();
            producer.send(message(topic("push"), "a", "k", body));
            await(body, () -> found.contains(body));
            slowest = Math.max(slowest, (System.nanoTime() - began) / 1_000_000);
        }
        expect(bodies(40), found);
        // Held pulls are woken, not answered at their end.
        expect(true, slowest < 5_000);
    }

    static void orderly() throws Exception {
        DefaultMQProducer producer = producer("orderly");
        for (int i = 0; i < 80; i++) {
            int number = i;
            producer.send(message(topic("orderly"), "a", "k", "body " + i), (queues, message, argument) -> queues.get(number % 2), null);
        }
        Map<Integer, List<Integer>> found = new ConcurrentHashMap<>();
        AtomicInteger count = new AtomicInteger();
        AtomicInteger refused = new AtomicInteger();
        for (String instance : List.of("a", "b")) {
            DefaultMQPushConsumer consumer = consumer("orderly", instance);
            consumer.subscribe(topic("orderly"), "*");
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                if (refused.getAndIncrement() == 3) {
                    context.setSuspendCurrentQueueTimeMillis(50);
                    return ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT;
                }
                for (MessageExt one : messages) {
                    found.computeIfAbsent(one.getQueueId(), id -> new ArrayList<>()).add(Integer.parseInt(body(one).substring(5)));
                    count.incrementAndGet();
                }
                return ConsumeOrderlyStatus.SUCCESS;
            });
            consumer.start();
        }
        await("ordered messages", () -> count.get() >= 80);
        for (List<Integer> numbers : found.values()) {
            List<Integer> distinct = new ArrayList<>(new java.util.LinkedHashSet<>(numbers));
            for (int i = 1; i < distinct.size(); i++) {
                expect(distinct.get(i - 1) + 2, distinct.get(i));
            }
        }
        expect(2, found.size());
    }

    static void tags() throws Exception {
        DefaultMQProducer producer = producer("tags");
        Set<String> wanted = new TreeSet<>();
        for (int i = 0; i < 30; i++) {
            String tag = List.of("a", "b", "c").get(i % 3);
            producer.send(message(topic("tags"), tag, "k", tag + i));
            if (!tag.equals("b")) {
                wanted.add(tag + i);
            }
        }
        Set<String> found = collect(subscribed("tags", "a || c"), ConcurrentHashMap.newKeySet());
        await("tagged messages", () -> found.equals(wanted));
    }

    static void sql() throws Exception {
        DefaultMQProducer producer = producer("sql");
        Set<String> wanted = new TreeSet<>();
        for (int i = 0; i < 30; i++) {
            Message message = message(topic("sql"), i % 2 == 0 ? "even" : "odd", "k", "body " + i);
            message.putUserProperty("n", Integer.toString(i));
            producer.send(message);
            if (i > 10 && i <= 20 && i % 2 == 0) {
                wanted.add("body " + i);
            }
        }
        DefaultMQPushConsumer consumer = consumer("sql", "c");
        consumer.subscribe(topic("sql"), MessageSelector.bySql("n BETWEEN 11 AND 20 AND TAGS = 'even'"));
        Set<String> found = collect(consumer, ConcurrentHashMap.newKeySet());
        await("filtered messages", () -> found.equals(wanted));
        DefaultMQPushConsumer wrong = consumer("sqlwrong", "w");
        wrong.subscribe(topic("sql"), MessageSelector.bySql("n > > 1"));
        wrong.registerMessageListener((MessageListenerConcurrently) (m, c) -> ConsumeConcurrentlyStatus.CONSUME_SUCCESS);
        try {
            wrong.start();
            throw new AssertionError("a broken filter was accepted");
        } catch (org.apache.rocketmq.client.exception.MQClientException error) {
            expect(23, error.getResponseCode());
        }
    }

    static void delay() throws Exception {
        DefaultMQProducer producer = producer("delay");
        // The topic exists before the consumer starts.
        producer.send(message(topic("delay"), "a", "k", "now"));
        Map<String, Long> found = new ConcurrentHashMap<>();
        DefaultMQPushConsumer consumer = subscribed("delay", "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt one : messages) {
                found.put(body(one), System.currentTimeMillis());
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        await("the first message", () -> found.containsKey("now"));
        Message late = message(topic("delay"), "a", "k", "late");
        late.setDelayTimeLevel(2);
        long sent = System.currentTimeMillis();
        producer.send(late);
        await("the delayed message", () -> found.containsKey("late"));
        if (found.get("late") - sent < 4_500) {
            throw new AssertionError("too early: " + (found.get("late") - sent));
        }
    }

    static void retry() throws Exception {
        DefaultMQProducer producer = producer("retry");
        producer.send(message(topic("retry"), "a", "k", "bad"));
        List<Integer> times = new ArrayList<>();
        DefaultMQPushConsumer consumer = subscribed("retry", "*");
        consumer.setMaxReconsumeTimes(2);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            synchronized (times) {
                times.add(messages.get(0).getReconsumeTimes());
            }
            expect(topic("retry"), messages.get(0).getTopic());
            context.setDelayLevelWhenNextConsume(1);
            return ConsumeConcurrentlyStatus.RECONSUME_LATER;
        });
        consumer.start();
        await("three deliveries", () -> {
            synchronized (times) {
                return times.equals(List.of(0, 1, 2));
            }
        });
        DefaultMQPullConsumer dead = at(new DefaultMQPullConsumer("c-dead-" + run, hook), "cdead");
        dead.start();
        closing.add(dead::shutdown);
        MessageQueue queue = new MessageQueue("%DLQ%c-retry-" + run, System.getProperty("broker", "broker-a"), 0);
        await("the dead letter", () -> {
            try {
                PullResult result = dead.pull(queue, "*", 0, 4);
                return result.getPullStatus() == PullStatus.FOUND && body(result.getMsgFoundList().get(0)).equals("bad");
            } catch (org.apache.rocketmq.client.exception.MQClientException | org.apache.rocketmq.client.exception.MQBrokerException error) {
                return false;
            }
        });
    }

    static void broadcast() throws Exception {
        DefaultMQProducer producer = producer("broadcast");
        producer.send(message(topic("broadcast"), "a", "k", "first"));
        List<Set<String>> found = new ArrayList<>();
        for (String instance : List.of("a", "b")) {
            DefaultMQPushConsumer consumer = consumer("broadcast", instance);
            // RocketMQ 5 has moved the class of this enum.
            consumer.setMessageModel(
                Enum.valueOf(consumer.getMessageModel().getDeclaringClass(), "BROADCASTING"));
            consumer.subscribe(topic("broadcast"), "*");
            found.add(collect(consumer, ConcurrentHashMap.newKeySet()));
        }
        await("the first message", () -> found.get(0).contains("first") && found.get(1).contains("first"));
        for (int i = 0; i < 10; i++) {
            producer.send(message(topic("broadcast"), "a", "k", "body " + i));
        }
        await("broadcast messages", () -> found.get(0).size() == 11 && found.get(1).size() == 11);
    }

    // ------------------------------------------------------------------------------- transactions
    static TransactionMQProducer transactional(String name, LocalTransactionState atSend, LocalTransactionState atCheck, AtomicInteger checks) throws Exception {
        TransactionMQProducer producer = at(new TransactionMQProducer("p-" + name + "-" + run, hook), "p" + name);
        producer.setSendMsgTimeout((int) PATIENCE_S * 1000);
        producer.setTransactionListener(new TransactionListener() {
            public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
                return argument == null ? atSend : (LocalTransactionState) argument;
            }

            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                checks.incrementAndGet();
                expect(topic(name), message.getTopic());
                return message.getKeys().equals("drop") ? LocalTransactionState.ROLLBACK_MESSAGE : atCheck;
            }
        });
        producer.start();
        closing.add(producer::shutdown);
        return producer;
    }

    static void transaction() throws Exception {
        TransactionMQProducer producer = transactional("transaction", null, null, new AtomicInteger());
        producer.send(message(topic("transaction"), "a", "k", "plain"));
        for (LocalTransactionState state : List.of(LocalTransactionState.COMMIT_MESSAGE, LocalTransactionState.ROLLBACK_MESSAGE)) {
            SendResult result = producer.sendMessageInTransaction(message(topic("transaction"), "a", "k", state.name()), state);
            expect(SendStatus.SEND_OK, result.getSendStatus());
        }
        producer.send(message(topic("transaction"), "a", "k", "last"));
        Set<String> found = collect(subscribed("transaction", "*"), ConcurrentHashMap.newKeySet());
        await("the committed message", () -> found.equals(Set.of("plain", "last", "COMMIT_MESSAGE")));
        Thread.sleep(500);
        expect(3, found.size());
    }

    /** The broker has to check soon: transactionCheckInterval and transactionTimeOut of about a second. */
    static void check() throws Exception {
        AtomicInteger checks = new AtomicInteger();
        TransactionMQProducer producer = transactional("check", LocalTransactionState.UNKNOW, LocalTransactionState.COMMIT_MESSAGE, checks);
        producer.send(message(topic("check"), "a", "k", "plain"));
        producer.sendMessageInTransaction(message(topic("check"), "a", "keep", "kept"), null);
        producer.sendMessageInTransaction(message(topic("check"), "a", "drop", "dropped"), null);
        Set<String> found = collect(subscribed("check", "*"), ConcurrentHashMap.newKeySet());
        await("the message that a check committed", () -> found.equals(Set.of("plain", "kept")) && checks.get() >= 2);
        Thread.sleep(2500);
        expect(Set.of("plain", "kept"), found);
        expect(2, checks.get());
    }

    // ------------------------------------------------------------------------------ request-reply
    static void request() throws Exception {
        DefaultMQProducer producer = producer("request");
        DefaultMQProducer answers = producer("answers");
        producer.send(message(topic("request"), "a", "k", "first"));
        DefaultMQPushConsumer consumer = subscribed("request", "*");
        CountDownLatch ready = new CountDownLatch(1);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt one : messages) {
                if (body(one).equals("first")) {
                    ready.countDown();
                    continue;
                }
                try {
                    Message reply = MessageUtil.createReplyMessage(one, ("re: " + body(one)).getBytes(StandardCharsets.UTF_8));
                    answers.send(reply, 3000);
                } catch (Exception error) {
                    error.printStackTrace();
                    return ConsumeConcurrentlyStatus.RECONSUME_LATER;
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        expect(true, ready.await(PATIENCE_S, TimeUnit.SECONDS));
        // A broker knows the producer after its first heartbeat.
        Thread.sleep(2500);
        Message reply = producer.request(message(topic("request"), "a", "k", "hello"), PATIENCE_S * 1000);
        expect("re: hello", body(reply));
    }

    // -------------------------------------------------------------------------------------- query
    static void query() throws Exception {
        DefaultMQProducer producer = producer("query");
        SendResult sent = producer.send(message(topic("query"), "a", "order-1 order-2", "found me"));
        await("the query by key", () -> {
            try {
                QueryResult result = producer.queryMessage(topic("query"), "order-2", 32, 0, Long.MAX_VALUE);
                return result.getMessageList().size() == 1 && body(result.getMessageList().get(0)).equals("found me");
            } catch (org.apache.rocketmq.client.exception.MQClientException error) {
                return false;
            }
        });
        expect("found me", body(producer.viewMessage(topic("query"), sent.getMsgId())));
        expect("found me", body(producer.viewMessage(topic("query"), sent.getOffsetMsgId())));
    }
}
