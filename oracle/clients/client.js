// The Node.js client of npm (ali-ons 3.12.0) against a name server: prints OK or FAIL.
'use strict';

const { Consumer, Message, Producer } = require('ali-ons');
const MessageQueue = require('ali-ons/lib/message_queue');
const http = require('urllib');

const topic = 't-node';
const options = {
  httpclient: http,
  nameSrv: process.argv[2],
  accessKeyId: 'unused',
  accessKeySecret: 'unused',
  logger: { info() {}, warn() {}, error(e) { console.error(e); }, debug() {} },
};

async function send() {
  const producer = new Producer({ ...options, producerGroup: 'p-node' });
  await producer.ready();
  for (let i = 0; i < 20; i++) {
    const result = await producer.send(new Message(topic, 'a', `body ${i}`));
    if (result.sendStatus !== 'SEND_OK') throw new Error(result.sendStatus);
  }
  await producer.close();
}

async function push() {
  const consumer = new Consumer({ ...options, consumerGroup: 'c-node', consumeFromWhere: 'CONSUME_FROM_FIRST_OFFSET' });
  const found = new Set();
  await new Promise((resolve, reject) => {
    setTimeout(() => reject(new Error(`got ${found.size} of 20`)), 90000);
    consumer.subscribe(topic, 'a', async message => {
      found.add(message.body.toString());
      if (found.size === 20) resolve();
    });
  });
  await consumer.close();
}

// The package has no pull consumer: this is the pull that its push consumer makes.
async function pull() {
  const consumer = new Consumer({ ...options, consumerGroup: 'c-node-pull' });
  await consumer.ready();
  const found = new Set();
  for (let queueId = 0; queueId < 4; queueId++) {
    const queue = new MessageQueue(topic, 'broker-a', queueId);
    for (let offset = 0, end = 1; offset < end;) {
      const result = await consumer.pullKernelImpl(queue, 'a', 'TAG', 0, offset, 0);
      if (result.pullStatus !== 'FOUND') break;
      for (const message of result.msgFoundList) found.add(message.body.toString());
      offset = result.nextBeginOffset;
      end = result.maxOffset;
    }
  }
  await consumer.close();
  if (found.size !== 20) throw new Error(`got ${found.size} of 20`);
}

(async () => {
  for (const work of [ send, push, pull ]) {
    try {
      await work();
      console.log('OK', work.name);
    } catch (error) {
      console.log('FAIL', work.name, error);
    }
  }
  process.exit(0);
})();
