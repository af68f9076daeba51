// The Node.js client of npm (ali-ons 3.12.0) against a name server: prints OK or FAIL.
'use strict';

const { Consumer, Message, Producer } = require('ali-ons');
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

(async () => {
  for (const work of [ send, push ]) {
    try {
      await work();
      console.log('OK', work.name);
    } catch (error) {
      console.log('FAIL', work.name, error);
    }
  }
  process.exit(0);
})();
