// Real Go clients against a name server: send, pull and push; prints OK or FAIL.
package main

import (
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

const topic = "t-go"

func main() {
	rlog.SetLogLevel("fatal")
	names := []string{os.Args[1]}
	for _, one := range []struct {
		name string
		run  func([]string) error
	}{{"send", send}, {"push", push}, {"pull", pull}} {
		if err := one.run(names); err != nil {
			fmt.Println("FAIL", one.name, err)
		} else {
			fmt.Println("OK", one.name)
		}
	}
}

func send(names []string) error {
	made, err := rocketmq.NewProducer(producer.WithNameServer(names), producer.WithGroupName("p-go"))
	if err != nil {
		return err
	}
	if err = made.Start(); err != nil {
		return err
	}
	defer made.Shutdown()
	for i := 0; i < 20; i++ {
		message := primitive.NewMessage(topic, []byte(fmt.Sprint("body ", i))).WithTag("a").WithKeys([]string{fmt.Sprint("k", i)})
		result, err := made.SendSync(context.Background(), message)
		if err != nil {
			return err
		}
		if result.Status != primitive.SendOK {
			return fmt.Errorf("status %v", result.Status)
		}
	}
	return nil
}

func push(names []string) error {
	made, err := rocketmq.NewPushConsumer(consumer.WithNameServer(names), consumer.WithGroupName("c-go"),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset))
	if err != nil {
		return err
	}
	var lock sync.Mutex
	found := map[string]bool{}
	err = made.Subscribe(topic, consumer.MessageSelector{Type: consumer.TAG, Expression: "a"},
		func(_ context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
			lock.Lock()
			defer lock.Unlock()
			for _, one := range messages {
				found[string(one.Body)] = true
			}
			return consumer.ConsumeSuccess, nil
		})
	if err != nil {
		return err
	}
	if err = made.Start(); err != nil {
		return err
	}
	defer made.Shutdown()
	for end := time.Now().Add(90 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		lock.Lock()
		count := len(found)
		lock.Unlock()
		if count == 20 {
			return nil
		}
	}
	return fmt.Errorf("got %d of 20", len(found))
}

func pull(names []string) error {
	made, err := rocketmq.NewPullConsumer(consumer.WithNameServer(names), consumer.WithGroupName("c-go-pull"),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset))
	if err != nil {
		return err
	}
	if err = made.Subscribe(topic, consumer.MessageSelector{Type: consumer.TAG, Expression: "*"}); err != nil {
		return err
	}
	if err = made.Start(); err != nil {
		return err
	}
	defer made.Shutdown()
	found := map[string]bool{}
	for end := time.Now().Add(90 * time.Second); time.Now().Before(end) && len(found) < 20; {
		context, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		result, err := made.Poll(context, 2*time.Second)
		cancel()
		if consumer.IsNoNewMsgError(err) || result == nil {
			continue
		}
		if err != nil {
			return err
		}
		for _, one := range result.GetMsgList() {
			found[string(one.Body)] = true
		}
		made.ACK(context, result, consumer.ConsumeSuccess)
	}
	if len(found) != 20 {
		return fmt.Errorf("got %d of 20", len(found))
	}
	return nil
}
