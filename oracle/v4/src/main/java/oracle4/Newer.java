package oracle4;

import java.util.ArrayList;
import java.util.List;
import java.util.Random;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/** Batches and transactions, with the client of 4.3 or later. */
final class Newer implements Main.Sends {
    private TransactionMQProducer transactions;

    @Override
    public void send(DefaultMQProducer producer, Random random) throws Exception {
        for (int i = 0; i < 8; i++) {
            List<Message> batch = new ArrayList<>();
            for (int j = 0; j < 2 + random.nextInt(9); j++) {
                batch.add(new Message("BatchTopic", "bt" + j % 3, "bkey" + i + "_" + j, Main.body(random, 1 + random.nextInt(200))));
            }
            producer.send(batch);
        }
        transactions = new TransactionMQProducer("pg_tx");
        transactions.setNamesrvAddr(producer.getNamesrvAddr());
        transactions.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object number) {
                switch ((Integer) number % 3) {
                    case 0: return LocalTransactionState.COMMIT_MESSAGE;
                    case 1: return LocalTransactionState.ROLLBACK_MESSAGE;
                    default: return LocalTransactionState.UNKNOW;
                }
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                return message.getTags().equals("c") ? LocalTransactionState.COMMIT_MESSAGE : LocalTransactionState.ROLLBACK_MESSAGE;
            }
        });
        transactions.start();
        for (int i = 0; i < 18; i++) {
            Message message = new Message("TxTopic", i % 2 == 0 ? "c" : "r", "tx" + i, Main.body(random, 1 + random.nextInt(200)));
            transactions.sendMessageInTransaction(message, i);
        }
    }

    @Override
    public void close() {
        transactions.shutdown();
    }
}
